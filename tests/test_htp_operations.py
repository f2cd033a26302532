"""Operations compared one by one: the HTP rounds its norms and products down, which the benchmark has to show."""

import numpy as np
import pytest

from benchmarks.htp_operations import compare

pytestmark = pytest.mark.htp


def test_each_operation_is_compared_on_the_integers_of_the_cpu(small, tmp_path):
    (tmp_path / "weights").mkdir()
    text = "def main():\n    return sum(range(10))\n" * 3
    found = compare(small, text, [1], 30, tmp_path / "weights")[1]
    assert found.keys() == {"RMSNormalization", "MatMul", "Mul", "Add", "Sub", "Softmax", "Sigmoid", "Convert"}
    assert -0.6 < found["RMSNormalization"].mean() < -0.4
    assert found["MatMul"].mean() < 0
    assert np.abs(found["Convert"]).max() <= 1
