from __future__ import annotations
import numpy as np, io
def frame_bytes_max(n): return 8*n+4096
def encode_frame(v, codec, zstd_level=None): return v.astype(np.float32).tobytes()
def decode_frame(b, *, elements_expected, bytes_max=None): return np.frombuffer(b,np.float32).copy()
def pack_arrays(d):
    import msgspec
    return msgspec.msgpack.encode({k:(str(v.dtype),list(v.shape),v.tobytes()) for k,v in d.items()})
def unpack_arrays(b,m):
    import msgspec
    return {k:np.frombuffer(x,t).reshape(s) for k,(t,s,x) in msgspec.msgpack.decode(b).items()}
