from __future__ import annotations
import numpy as np
from dataclasses import dataclass
from atoll.errors import FrameRejected
@dataclass
class Merged:
    displacement: np.ndarray
class FragmentFold:
    def __init__(self, spans, method="mean"): self.s=None; self.w=0.0
    def add(self, d, weight, factor=1.0):
        self.s = d*np.float32(weight) if self.s is None else self.s+d*np.float32(weight); self.w+=weight
    def result(self): return Merged(self.s/np.float32(self.w))
def span_norms(spans,d): return [float(np.linalg.norm(d[s.offset:s.offset+s.size])) for s in spans]
def validate_displacement(v, spans, norms, norm_max):
    if not np.isfinite(v).all(): raise FrameRejected("not_finite","x")
