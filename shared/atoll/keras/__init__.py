"""`atoll.keras`: an island around `model.fit` of Keras 3 on JAX. It needs the extra `keras` and `KERAS_BACKEND=jax`."""

from atoll.keras.callback import IslandCallback

__all__ = ["IslandCallback"]
