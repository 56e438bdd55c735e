"""A Ray that is not there is said so at once."""

import pytest

from cluster.local import free_port
from cluster.pools import join_ray
from core.clock import SystemClock
from core.errors import Unavailable


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nobody_listens_is_refused_at_once(form: str) -> None:
    address = form.format(free_port())
    clock = SystemClock()
    started_s = clock.now_s()
    with pytest.raises(Unavailable, match=address):
        join_ray(address)
    assert clock.now_s() - started_s < 5.0
