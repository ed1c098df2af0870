"""Which cores are near a GPU."""

from types import SimpleNamespace

from runtime.near import cores_near, cores_of


def test_cores_are_read_as_linux_lists_them():
    assert cores_of("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert cores_of("\n") == set()


def test_cores_near_a_gpu_are_those_of_its_pci_device(tmp_path):
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text("16-19\n")
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert cores_near(gpu, tmp_path) == {16, 17, 18, 19}
    assert cores_near(SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0), tmp_path) == set()
    assert cores_near(SimpleNamespace(), tmp_path) == set()
