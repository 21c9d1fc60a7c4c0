"""What tests share: builders, a world around the pure machines, broken links, bodies of contracts."""

import pytest

for body in ("bus_contract", "founded_run"):
    pytest.register_assert_rewrite(f"{__name__}.{body}")
