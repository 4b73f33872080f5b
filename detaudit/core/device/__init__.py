"""The digest of CUDA tensors, computed on the device: kernel, launcher, ring."""
