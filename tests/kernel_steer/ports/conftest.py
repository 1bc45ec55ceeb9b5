"""Every test of the contract runs on both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.kernel_steer.kernel_support import needs_kernel_engine
from tests.kernel_steer.ports.stand import Stand


@pytest.fixture(params=["relay", pytest.param("kernel", marks=needs_kernel_engine)])
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    made = Stand(request.param)
    yield made
    made.close()


@pytest.fixture
def kernel_stand() -> Iterator[Stand]:
    made = Stand("kernel")
    yield made
    made.close()


@pytest.fixture(params=["relay", pytest.param("kernel", marks=needs_kernel_engine)])
def make_stand(request: pytest.FixtureRequest) -> Iterator[Callable[..., Stand]]:
    made: list[Stand] = []

    def make(**options: object) -> Stand:
        made.append(Stand(request.param, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for stand in made:
        stand.close()
