"""The least time of a launch is that of its bytes or of its operations, whichever is longer."""

import pytest

from kernels.roofline import DEVICES, H100, H200, TERA, Device, Traffic

TOY = Device("toy", 100.0, {"float32": 10.0, "bf16": 1000.0}, 1, 1024, 1024)


def test_a_launch_takes_as_long_as_the_slower_of_memory_and_arithmetic():
    heavy = Traffic(read=150, written=50, flops=100)
    assert TOY.seconds(heavy) == heavy.flops / TOY.peaks["float32"] == 10.0
    assert TOY.seconds(heavy, "bf16") == heavy.bytes / TOY.bandwidth == 2.0


def test_traffics_of_launches_in_a_row_add_up():
    assert Traffic(1, 2, 3) + Traffic(10, 20, 30) == Traffic(11, 22, 33)
    assert Traffic(1, 2, 3).bytes == 3


@pytest.mark.parametrize("device", DEVICES)
def test_hopper_does_as_many_operations_in_the_time_of_a_byte_as_its_data_sheet_says(device):
    """The ridge point, peak over bandwidth: 295 operations a byte in bf16 on the H100, 206 on the H200."""
    ridge = {H100.name: 295, H200.name: 206}[device.name]
    assert round(device.peaks["bf16"] / device.bandwidth) == ridge
    assert device.peaks["bf16"] == pytest.approx(2 * device.peaks["tf32"])
    # 132 multiprocessors of 128 lanes, a multiply-add a cycle at 1.98 GHz
    assert device.peaks["float32"] == pytest.approx(device.multiprocessors * 128 * 2 * 1.98e9, rel=0.01)
    assert device.bandwidth in (3.35 * TERA, 4.8 * TERA)
