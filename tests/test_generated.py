import numpy as np
import pytest

from edgekv.graphs.decoder import decoder_layer, logits
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.generated import WINDOWS_AT_ONCE, GeneratedText, _DecodeOps
from exporters.quantize.reference import Reference, Weights
from tests.checkpoints import ARCHITECTURES, WINDOW, write_checkpoint

LENGTH = WINDOW + 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Checkpoint.open(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"))))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_token_by_token_the_logits_are_those_of_the_reference(tmp_path, name):
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES[name])))
    windows = np.random.default_rng(0).integers(0, checkpoint.spec.vocab, (2, LENGTH))
    ops, found = _DecodeOps(checkpoint, Weights(checkpoint), len(windows), LENGTH), []
    for position in range(LENGTH):
        ops.position = position
        hidden = ops.embed(windows[:, position, None], "embedding")
        for layer in range(checkpoint.spec.layers):
            hidden = decoder_layer(ops, checkpoint.spec, layer, hidden)
        found.append(logits(ops, checkpoint.spec, hidden)[:, 0])
    expected = np.stack(list(Reference(checkpoint).logits(windows)))
    assert np.abs(np.stack(found, axis=1) - expected).max() < 1e-4 * np.abs(expected).max()


def test_windows_begin_alike_and_contain_tokens_of_the_vocabulary(checkpoint, tmp_path):
    count = WINDOWS_AT_ONCE + 3
    text, told = GeneratedText(checkpoint, "0", [256], 8, count, tmp_path), []
    windows = text.windows(resume=False, progress=lambda done, total: told.append((done, total)))
    assert windows.shape == (count, 8) and windows.dtype == np.int64
    assert (windows[:, 0] == 256).all() and (windows[:, 1] < 256).all()  # from 256 on tokens are special
    assert windows.min() >= 0 and windows.max() < checkpoint.spec.vocab
    assert len(np.unique(windows, axis=0)) == count
    assert told[-1] == (16, 16) and told == sorted(told)
    text.remove()
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_drawn_with_the_probabilities_of_the_model(checkpoint, tmp_path):
    windows = GeneratedText(checkpoint, "0", [256], 3, 1024, tmp_path).windows(resume=False, progress=lambda *_: None)
    starts, counts = np.unique(windows[:, 1], return_counts=True)
    drawn = expected = 0.0
    for start in starts[np.argsort(counts)[-64:]]:
        (scores,) = Reference(checkpoint, 3).logits([np.array([256, start])])
        chances = np.exp(scores[-1] - np.logaddexp.reduce(scores[-1]))
        likely = np.flatnonzero(chances > np.median(chances))
        mine = windows[windows[:, 1] == start, 2]
        drawn, expected = drawn + np.isin(mine, likely).sum(), expected + len(mine) * chances[likely].sum()
    assert expected > 100 and abs(drawn - expected) < 4 * np.sqrt(expected)


def test_what_is_written_is_kept_until_all_is_and_resumed(checkpoint, tmp_path):
    def text():
        return GeneratedText(checkpoint, "0", [256], 8, 2 * WINDOWS_AT_ONCE, tmp_path)

    whole = text().windows(resume=False, progress=lambda *_: None)
    for kept in tmp_path.iterdir():
        (kept / "tokens.npy").unlink()
        kept.rmdir()

    def stop(done, total):
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        text().windows(resume=False, progress=stop)
    (kept,) = tmp_path.iterdir()
    told = []
    assert np.array_equal(text().windows(resume=True, progress=lambda done, _: told.append(done)), whole)
    assert told[:2] == [8, 9]
    (kept / "tokens.npy").write_bytes(b"damaged")
    assert np.array_equal(text().windows(resume=True, progress=lambda *_: None), whole)


def test_another_checkpoint_writes_anew(checkpoint, tmp_path):
    for weights in ("0", "1"):
        GeneratedText(checkpoint, weights, [256], 8, 2, tmp_path).windows(resume=True, progress=lambda *_: None)
    assert len(list(tmp_path.iterdir())) == 2
