import numpy as np

from edgekv.kv.policies.rotation import Rotation


def test_elements_beyond_the_frequencies_stay_as_they_are():
    """Heads of 16 of which 12 turn: the first 12 as a head of 12 would."""
    keys = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (5, 16)).astype(np.uint8)
    rotation = Rotation([1.0, 0.5, 0.2, 0.1, 0.05, 0.01])
    angles = rotation.angles([-1, -2, -3, -40, -41])
    turned = rotation.turn(keys, 128, None, angles)
    assert np.array_equal(turned[:, 12:], keys[:, 12:])
    assert np.array_equal(turned[:, :12], rotation.turn(keys[:, :12], 128, None, angles))
    assert not np.array_equal(turned[:, :12], keys[:, :12])
