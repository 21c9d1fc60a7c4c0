r"""Which outer states follow from the values, so that they need not be stored with every version.

Momentum and what rounding took are six bytes per parameter, and a delta of four bits is half a byte. So where versions are sent
as deltas, a shard does not store its state with each. The momentum is *defined* by the values sent, R:

.. math::

    m' = (\mu m + (R - R') / \eta) / (1 + \mu)

which is the outer step solved for its momentum (`Nesterov.derive`). Rounding's error is in it, as a difference
of two residues, and a share of mu^2 / (1 + mu) of it (0.07 at mu = 0.3) enters the next step, where the residue takes it back.
A keyframe is stored with its momentum. Who reads it and the deltas after it has the momentum of the newest version to the bit
(`atoll.run.outer_state`). The residue stays with the owner of a shard. The next one begins with none, so at most half a
quantiser's step of each parameter is lost with an owner.

Where the state says more than the values do (an average, an optimizer of optax), it is stored with every version, residue
included.
"""

from __future__ import annotations

from atoll.codec import KEYFRAME
from atoll.protocol.settings import NESTEROV, ProtocolSettings


def derivable(settings: ProtocolSettings) -> bool:
    """Return whether the values of versions tell the outer state: they are sent as deltas, and it is a momentum at most."""
    return settings.codec_down != KEYFRAME and settings.outer == NESTEROV and not settings.average_versions
