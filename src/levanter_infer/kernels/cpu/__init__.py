"""C++ kernels for CPUs, called through the XLA FFI."""
