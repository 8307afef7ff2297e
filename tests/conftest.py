import torch

# Two OpenMP threads that share a busy core wait for each other most of the time; the tests' tensors are tiny.
torch.set_num_threads(1)
