import os

# Two OpenMP threads that share a busy core wait for each other most of the time; the tests' tensors are tiny.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
