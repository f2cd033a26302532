import json
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from benchmarks.published_speed import bandwidths
from devices import (
    CATALOGUE,
    Device,
    Memory,
    Span,
    UnknownDeviceError,
    find,
    nearest_published,
    published_speeds,
    search,
)
from devices.lookup import _key
from edgekv.cli import run

NAMES = [(name, device) for device in CATALOGUE for name in device.names]


def test_every_name_means_one_device():
    assert len({_key(name) for name, _ in NAMES}) == len(NAMES)
    assert len({device.soc_model for device in CATALOGUE}) == len(CATALOGUE)


@given(st.sampled_from(NAMES), st.data())
def test_find_ignores_case_spaces_and_punctuation(entry, data):
    name, device = entry
    noise = st.sampled_from(["", " ", "-", "_", "."])
    spelled = "".join(data.draw(noise) + (c.upper() if data.draw(st.booleans()) else c.lower()) for c in name)
    assert find(spelled) is device


@pytest.mark.parametrize(
    ("name", "soc"),
    [
        ("8 gen 3", "SM8650"),
        ("Snapdragon 8 Elite", "SM8750"),
        ("8 elite gen 5", "SM8850"),
        ("x-elite", "SC8380XP"),
        ("Snapdragon X2 Elite", "SC8480XP"),
        ("galaxy s23 plus", "SM8550"),
        ("RB3 Gen 2", "QCS6490"),
        ("7+ Gen 3", "SM7675"),
        ("7 Gen 3", "SM7550"),
    ],
)
def test_marketing_names_and_products(name, soc):
    assert find(name).soc == soc


@pytest.mark.parametrize("name", ["", "snapdragon", "57", "SM8551", "Snapdragon X Plus"])
def test_an_unknown_name_is_refused_and_named(name):
    with pytest.raises(UnknownDeviceError) as refused:
        find(name)
    assert repr(name) in str(refused.value)
    assert all(device.soc in str(refused.value) for device in CATALOGUE)


def test_a_refusal_suggests_what_was_meant():
    with pytest.raises(UnknownDeviceError, match="Did you mean SM8550"):
        find("SM8551")
    assert "Snapdragon 8 Gen 3 (SM8650)" in UnknownDeviceError("Snapdragn 8 gen3").near
    assert UnknownDeviceError("SM8560").near == ("SM8550", "SM8650")


def test_sixteen_bit_caches_need_v73():
    assert {d.soc for d in CATALOGUE if not d.supports_kv("s16")} == {"SM8350", "SM8450", "QCS6490", "SA8295"}
    assert all(d.supports_kv("u8") for d in CATALOGUE)


def test_bandwidth_follows_from_transfer_rate_and_width():
    assert find("SM8650").dram_gb_per_s == pytest.approx(76.8)
    assert str(find("SC8380XP").memory) == "LPDDR5X-8448, 128 bit"
    assert all("not confirmed" in d.source for d in CATALOGUE if not d.memory.confirmed)
    with pytest.raises(ValueError, match="bus_bits"):
        Memory("LPDDR5", 6400, 40)
    with pytest.raises(ValueError, match="arch"):
        replace(find("SM8650"), arch=0)


def test_published_speeds_are_below_the_peak_bandwidth_and_name_their_source():
    for device in CATALOGUE:
        reached = device.decode_gb_per_s
        assert 0 < reached.low <= reached.high < 0.91 * device.dram_gb_per_s
        assert device.speed.source and device.speed.measured_on
    own = {"SM8650", "SM8750", "SM8850", "SC8380XP", "SC8480XP", "QCS9100", "SA8255"}
    assert {d.soc for d in CATALOGUE if d.has_own_speed} == own
    with pytest.raises(ValueError, match="span: got 2 to 1"):
        Span(2, 1)


@pytest.mark.parametrize("name", ["Snapdragon X Plus", "x-plus", "Qualcomm Snapdragon X Plus"])
def test_a_name_of_several_chips_says_which_and_which_names_fit(name):
    with pytest.raises(
        UnknownDeviceError, match=r"sold with two chips: with 10 cores .* SC8380XP; with 8 cores"
    ) as said:
        find(name)
    assert said.value.near == ("X1P-64-100 (SC8380XP)", "X1P-66-100 (SC8380XP)")
    assert all(find(fitting.split(" (")[0]).soc == "SC8380XP" for fitting in said.value.near)


def test_a_known_chip_that_is_not_in_the_catalogue_says_so():
    with pytest.raises(UnknownDeviceError, match=r"It is SC8340XP, .* not in the catalogue\.$"):
        find("X1P-42-100")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SM8250", "V66: no HTP that this compiler supports."),
        ("Qualcomm RB5", "Its Qualcomm chip is QRB5165, V66: no HTP that this compiler supports."),
        ("Galaxy S20", "Its Qualcomm chip is SM8250, V66: no HTP that this compiler supports."),
        ("Pixel 4", "Its Qualcomm chip is SM8150, V66: no HTP that this compiler supports."),
        ("Snapdragon 845", "V65: no HTP that this compiler supports."),
        ("8+ Gen 1", "It has SM8475, which is not in the catalogue."),
        ("Pixel 9", "Its chip is Google's, not Qualcomm's"),
        ("SA8775P", "automotive chip that is not in the catalogue"),
        ("iPhone 16", "Its chip is Apple's, not Qualcomm's"),
        ("Samsung Exynos 2400", "Its chip is Samsung's, not Qualcomm's"),
    ],
)
def test_a_chip_that_cannot_be_meant_gets_no_similar_name(name, words):
    refused = UnknownDeviceError(name)
    assert words in refused.fix and "Did you mean" not in str(refused) and refused.near == ()
    assert not any(device.soc in str(refused) for device in CATALOGUE)


@given(st.sampled_from(NAMES), st.data())
def test_a_search_for_part_of_a_name_finds_its_chip(entry, data):
    name, device = entry
    assert search(name).devices == (device,)
    key = _key(name)
    start = data.draw(st.integers(0, len(key) - 2))
    part = key[start : data.draw(st.integers(start + 2, len(key)))]
    found, named = search(part), {chip for name, chip in NAMES if _key(name) == _key(part)}
    if named:
        assert {*found.devices} == named, "a whole name means its chip alone"
    elif [_key(other.name) for other in found.others] != [_key(part)]:
        assert device in found.devices


@pytest.mark.parametrize(
    ("word", "chips"),
    [
        ("s24", ["SM8650"]),
        ("Z Fold", ["SM8350", "SM8550", "SM8650", "SM8750"]),
        ("nothing phone", ["SM8735", "SM7635"]),
        ("v81", ["SM8850", "SM8845", "SC8480XP"]),
        ("x plus", ["SC8380XP"]),
        ("sm8250", []),
        ("", [device.soc for device in CATALOGUE]),
        ("Qualcomm Snapdragon", [device.soc for device in CATALOGUE]),
    ],
)
def test_a_search_word(word, chips):
    assert [device.soc for device in search(word).devices] == chips


def test_a_search_that_finds_nothing_is_refused_and_names_what_is_like_it():
    with pytest.raises(UnknownDeviceError, match="Did you mean SM8550"):
        search("SM8551")


V66_CHIPS = ("SM8250", "QRB5165", "SM8150", "SM7250")


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["sm8250"], ["SM8250: V66: no HTP that this compiler supports."]),
        (["v66"], [f"{soc}: V66: no HTP that this compiler supports." for soc in V66_CHIPS]),
        (["Galaxy S20"], ["Samsung Galaxy S20: Its Qualcomm chip is SM8250, V66: no HTP that this compiler supports."]),
    ],
)
def test_the_command_says_why_a_chip_is_not_supported_and_suggests_none(arguments, lines, capsys):
    assert run(["devices", *arguments]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_the_command_maps_a_product_to_its_chip(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert run(["devices", "s24"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "SM8650-AC" in line]
    assert [cell.strip() for cell in row.split("│")[1:6]] == ["SM8650", "57", "V75", "8 MiB", "u8, s8, s16"]
    assert "Samsung Galaxy S24 Ultra," in row and "Samsung Galaxy S24 *," in row
    assert run(["devices", "s24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["others"] == []
    assert [(each["soc"], each["htp"]) for each in found["devices"]] == [("SM8650", 75)]
    assert found["devices"][0]["mixed_products"] == ["Samsung Galaxy S24", "Samsung Galaxy S24+"]
    assert run(["devices", "SM8551"]) == 2
    refused = capsys.readouterr()
    assert refused.out == "" and "Did you mean SM8550" in refused.err


def test_a_very_long_name_is_shortened():
    assert len(str(UnknownDeviceError("x" * 100_000))) < 1_000


def _compile(device: Device, folder: Path) -> bytes:
    """The context binary that the HTP compiler writes for a graph of one addition."""
    import numpy as np
    import onnxruntime as ort
    import onnxruntime_qnn as qnn
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("DequantizeLinear", ["a", "scale", "zero"], ["real"]),
        helper.make_node("Add", ["real", "real"], ["twice"]),
        helper.make_node("QuantizeLinear", ["twice", "scale", "zero"], ["b"]),
    ]
    ends = [[helper.make_tensor_value_info(name, TensorProto.UINT8, [1, 64])] for name in "ab"]
    encoding = [numpy_helper.from_array(np.float32(0.01), "scale"), numpy_helper.from_array(np.uint8(128), "zero")]
    model = helper.make_model(
        helper.make_graph(nodes, "twice", *ends, encoding),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    if not any(d.ep_name == "QNNExecutionProvider" for d in ort.get_ep_devices()):
        ort.register_execution_provider_library("QNNExecutionProvider", qnn.get_library_path())
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_embed_mode", "0")
    options.add_session_config_entry("ep.context_file_path", str(folder / f"{device.soc}.onnx"))
    options.add_provider_for_devices(
        [d for d in ort.get_ep_devices() if d.ep_name == "QNNExecutionProvider"][:1],
        {"backend_path": qnn.get_qnn_htp_path(), "soc_model": str(device.soc_model)},
    )
    ort.InferenceSession(model.SerializeToString(), options)
    (binary,) = folder.glob(f"{device.soc}*.bin")
    return binary.read_bytes()


def _targets(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for device in CATALOGUE:
        binary = _compile(device, folder)
        soc, arch = re.search(rb"soc_type=(\w+);arch=(\d+)", binary).groups()
        (vtcm_bytes,) = re.search(rb"vtcm_size=(\d+)", binary).groups()
        found.append((soc.decode(), int(arch), int(vtcm_bytes) >> 20))
    return found


@pytest.mark.thorough
@pytest.mark.htp
def test_the_htp_compiler_targets_what_the_catalogue_says(tmp_path):
    # A child process, so that this one stays free to load the compiler in its own way.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        found = child.submit(_targets, tmp_path).result()
    assert found == [(d.soc, d.arch, d.vtcm_mb) for d in CATALOGUE]


@pytest.mark.parametrize("device", [each for each in CATALOGUE if each.has_own_speed], ids=lambda each: each.soc)
def test_bandwidths_are_those_of_the_published_rows(device: Device) -> None:
    """On Genie older publications widen them."""
    for runtime, found in (("genie", device.speed.gb_per_s), ("geniex_qairt", device.speed.geniex_gb_per_s)):
        rates = bandwidths(device.soc, runtime).values()
        if found is None or not rates:
            assert not rates
            continue
        assert found.low <= min(rates) + 0.05 and max(rates) - 0.05 <= found.high
        if runtime == "geniex_qairt":
            assert (found.low, found.high) == pytest.approx((min(rates), max(rates)), abs=0.05)


def test_published_speeds_are_those_of_the_package() -> None:
    """The rows that Qualcomm's figures of three chips are known by."""
    rows = published_speeds()
    assert len(rows) == 1247 and {row.unit for row in rows} == {"npu", "gpu", "cpu"}
    known = {
        ("llama_v3_2_1b_instruct", "QCS9100", "genie"): (1052, 41.6),
        ("qwen3_0_6b", "QCS9100", "genie"): (1255, 88.2),
        ("llama_v3_2_1b_instruct", "SA8255", "genie"): (996, 35.0),
        ("qwen3_0_6b", "SM8850", "genie"): (2681, 132.8),
    }
    for (model, soc, runtime), (prefill, decode) in known.items():
        found = [row for row in rows if (row.model, row.soc, row.runtime, row.context) == (model, soc, runtime, 4096)]
        assert (prefill, decode) in [
            (round(row.prefill_tokens_per_s or 0), round(row.decode_tokens_per_s, 1)) for row in found
        ]


@pytest.mark.parametrize(("soc", "where"), [("SM8850", "SM8850"), ("SM8650", "QCS9100"), ("SM8845", "SM8850")])
def test_the_nearest_published_model_is_of_the_nearest_chip_and_size(soc: str, where: str) -> None:
    found = nearest_published(1_236_000_000, 4096, find(soc))
    assert {row.soc for row in found} == {where} and {row.unit for row in found} == {"npu"}
    assert len({row.model for row in found}) == 1 and found[0].billions in (1.0, 1.2)
    assert [row.context for row in found if row.runtime == "genie"] in ([4096], [])
