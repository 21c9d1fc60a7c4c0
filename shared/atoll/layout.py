from __future__ import annotations
import hashlib
from dataclasses import dataclass
import msgspec
class TensorSpec(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
class Slice(msgspec.Struct, frozen=True):
    tensor: int
    start: int
    stop: int
@dataclass(frozen=True)
class Span:
    tensor_name: str
    start: int
    stop: int
    offset: int
    size: int
    direct: bool
class Layout(msgspec.Struct, frozen=True):
    tensors: tuple[TensorSpec, ...]
    fragments: tuple[tuple[Slice, ...], ...]
    direct: tuple[str, ...] = ()
    @property
    def fingerprint(self):
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
    def spans(self, p):
        out=[];off=0
        for s in self.fragments[p]:
            t=self.tensors[s.tensor]
            row=1
            for d in t.shape[1:]: row*=d
            size=(s.stop-s.start)*row
            out.append(Span(t.name,s.start,s.stop,off,size,t.name in self.direct)); off+=size
        return tuple(out)
    def fragment_sizes(self):
        return tuple(sum(x.size for x in self.spans(p)) for p in range(len(self.fragments)))
def first_difference(a,b): return "differs"
def plan_layout(tensors, fragments, direct=()):
    total=sum(_n(t) for t in tensors); fair=total/fragments
    items=[]
    for i,t in enumerate(tensors):
        rows=t.shape[0] if t.shape else 1
        n=_n(t); parts=max(1,min(rows,-(-int(n)//max(1,int(fair/4)))) ) if n>fair/2 else 1
        cuts=[rows*k//parts for k in range(parts+1)]
        for a,b in zip(cuts,cuts[1:]): items.append((n*(b-a)//max(rows,1),i,a,b))
    items.sort(key=lambda x:(-x[0],x[1],x[2]))
    bins=[[] for _ in range(fragments)]; w=[0]*fragments
    for n,i,a,b in items:
        k=w.index(min(w)); bins[k].append(Slice(i,a,b)); w[k]+=n
    return Layout(tuple(tensors), tuple(tuple(sorted(b,key=lambda s:(s.tensor,s.start))) for b in bins), tuple(direct))
def _n(t):
    n=1
    for d in t.shape: n*=d
    return n
