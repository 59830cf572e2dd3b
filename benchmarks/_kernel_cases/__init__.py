"""What `benchmarks.kernels` measures of each kernel: a file each, with ``cases(smoke) -> list[Case]``."""
