from __future__ import annotations
import numpy as np
from atoll.layout import TensorSpec, plan_layout
def describe(tree):
    import jax
    return tuple(TensorSpec("/".join(str(getattr(k,"key",getattr(k,"idx",k))) for k in path), tuple(x.shape), str(x.dtype)) for path,x in jax.tree_util.tree_flatten_with_path(tree)[0])
def gather(layout, leaves, p):
    out=np.empty(layout.fragment_sizes()[p],np.float32)
    for s in layout.spans(p):
        a=np.asarray(leaves[s.tensor_name])
        a=a[s.start:s.stop] if a.ndim else a
        out[s.offset:s.offset+s.size]=a.reshape(-1)
    return out
def scatter(layout,p,flat,leaves):
    d={}
    for s in layout.spans(p):
        l=leaves[s.tensor_name]
        shape=((s.stop-s.start),*l.shape[1:]) if l.ndim else ()
        d.setdefault(s.tensor_name,[]).append((s.start,s.stop,flat[s.offset:s.offset+s.size].reshape(shape)))
    return d
