"""Tests on GPUs: a program for machines with PyTorch alone (`without_vllm`), and tests of the whole stack (`whole`)."""
