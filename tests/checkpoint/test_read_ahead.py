"""The system is asked for every byte of a model's weights, and for nothing else."""

import os

from tpdet.checkpoint.weight_files import read_ahead


def test_every_weight_file_is_asked_for_whole(tmp_path, monkeypatch):
    asked = {}
    hint = os.posix_fadvise

    def counting(descriptor, begin, length, advice):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        asked.setdefault(name, []).append((begin, begin + length))
        hint(descriptor, begin, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", counting)
    sizes = {"a.safetensors": 9 << 20, "b.safetensors": 3, "config.json": 5}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    read_ahead(tmp_path).join()
    assert sorted(asked) == ["a.safetensors", "b.safetensors"]
    for name, ranges in asked.items():
        end = 0
        for begin, after in ranges:
            assert begin == end
            end = after
        assert end >= sizes[name]


def test_a_directory_without_weights_is_no_error(tmp_path):
    read_ahead(tmp_path).join()
    read_ahead(tmp_path / "missing").join()
