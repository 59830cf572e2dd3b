"""The cases that `benchmarks.kernels` measures, a file for each kernel with ``cases(smoke) -> list[Case]``."""
