"""TPU kernels, nothing else."""
