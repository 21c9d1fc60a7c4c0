"""Small work is done at once, large work beside the loop."""

from __future__ import annotations

import threading

import pytest

from atoll.base.parallel import INLINE_ELEMENTS_MAX, off_loop


@pytest.mark.parametrize(
    ("elements", "inline"), [(0, True), (INLINE_ELEMENTS_MAX, True), (INLINE_ELEMENTS_MAX + 1, False)]
)
async def test_large_work_goes_to_a_thread(elements: int, inline: bool) -> None:  # noqa: FBT001
    assert (await off_loop(elements, threading.get_ident) == threading.get_ident()) == inline
    assert await off_loop(elements, sorted, [2, 1], reverse=True) == [2, 1]
    with pytest.raises(ZeroDivisionError):
        await off_loop(elements, divmod, 1, 0)
