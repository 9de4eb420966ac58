"""The host program: the steps that run kernels and communication in order."""
