"""Every implementation of attention against the torch reference, on all variants; Triton's is interpreted
where there is no GPU, and compiled where there is one."""


import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
