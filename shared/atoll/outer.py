from __future__ import annotations
from typing import Protocol
import numpy as np
class OuterOptimizer(Protocol):
    def init(self, params): ...
    def update(self, params, displacement, state): ...
class Nesterov:
    def __init__(self, lr, m): self.lr=np.float32(lr); self.m=m
    def init(self,p): return {}
    def update(self,p,d,s): return p-self.lr*d, s
def make_outer(spec, lr, m): return Nesterov(lr,m)
