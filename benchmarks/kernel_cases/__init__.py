"""The cases of `benchmarks.kernels`, a file for each kernel with ``cases(smoke) -> list[Case]``."""
