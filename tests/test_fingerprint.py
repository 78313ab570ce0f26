"""Every operation gives the bits that are recorded in `fingerprint.json`."""

import pytest

import fingerprint
from support.rotation import rotated

GROUPS = fingerprint.groups()
RECORDED = fingerprint.recorded()


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    "name",
    [
        *rotated(name for name, group in GROUPS.items() if not group.slow),
        *(pytest.param(n, marks=pytest.mark.slow) for n, group in GROUPS.items() if group.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:mcftensor runs without compiled code")
@pytest.mark.filterwarnings("ignore::mcftensor.errors.ZeroMomentWarning")
@pytest.mark.filterwarnings("ignore::mcftensor.errors.NarrowStateWarning")
def test_bits_are_those_recorded(name):
    try:
        found = GROUPS[name].digests()
    except fingerprint.RefusedByTorch as refusal:
        pytest.skip(str(refusal))
    assert not fingerprint.differences(found, RECORDED.get(name, {}))


def test_nothing_recorded_is_left_out():
    assert RECORDED.keys() == GROUPS.keys()
