"""CUDA C++ kernels for Hopper and newer, compiled on demand; elsewhere the Triton kernels do their work."""
