import numpy as np
import pytest

from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.spec.chat import ChatTemplates
from edgekv.spec.tensors import EMBEDDING
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.calibrate import CHAT_SHARE, chat_opening
from exporters.quantize.generated import WINDOWS_AT_ONCE, Beginnings, _DecodeOps, generated_windows, text_tokens
from exporters.quantize.reference import Reference, Weights
from tests.support.checkpoints import ARCHITECTURES, EVERY_OPERATION, WINDOW, write_checkpoint
from tests.support.foreign_files import write_gguf
from tests.support.thorough import variants

LENGTH = WINDOW + 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Checkpoint.open(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"))))


@pytest.mark.parametrize(
    "name",
    variants(ARCHITECTURES, {*EVERY_OPERATION, "lfm3", "qwen3_5", "cohere2", "hunyuan", "arcee", "phi", "exaone4"}),
)
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


@pytest.mark.parametrize(
    "changes", [{}, ARCHITECTURES["gemma4"] | {"hidden_size_per_layer_input": 32}], ids=["llama", "gemma4"]
)
def test_rows_of_a_quantized_table_are_those_of_the_whole_table(tmp_path, changes):
    """A batch of tokens begins with their embeddings; a GGUF file has them in blocks."""
    file = write_gguf(write_checkpoint(tmp_path, changes), tmp_path / "model.gguf", "Q8_0")
    checkpoint = Checkpoint.open(str(file))
    tokens = np.array([[3], [300], [7]])
    found = Weights(checkpoint).embeddings(tokens)
    assert np.array_equal(found, checkpoint.tensor(EMBEDDING)[tokens])
    assert written(checkpoint, 4).shape == (WINDOWS_AT_ONCE, 4)


def written(checkpoint, length, windows=WINDOWS_AT_ONCE, number=0, progress=lambda done, of: None, chat=(), special=()):
    beginnings = Beginnings((256,), text_tokens(checkpoint.tokenizer, checkpoint.spec.vocab), special, chat)
    return generated_windows(checkpoint, beginnings, number, windows, length, progress)


def test_windows_begin_alike_and_contain_tokens_of_the_vocabulary(checkpoint):
    told = []
    windows = written(checkpoint, 8, progress=lambda done, of: told.append(done / of))
    assert windows.shape == (WINDOWS_AT_ONCE, 8) and windows.dtype == np.int64
    assert (windows[:, 0] == 256).all() and (windows[:, 1] < 256).all()  # from 256 on tokens are special
    assert windows.min() >= 0 and windows.max() < checkpoint.spec.vocab
    assert len(np.unique(windows, axis=0)) == len(windows) and told == sorted(told) and told[-1] == 1


def test_a_window_holds_several_texts_of_which_the_first_begins_as_windows_do(checkpoint):
    windows = written(checkpoint, 512, windows=2, chat=(70, 71, 72))
    assert windows.shape == (2, 512) and (windows[:, 0] == 256).all() and windows[:, 1:].max() < 256


def test_special_tokens_are_written_as_far_as_chats_have_them(checkpoint):
    """A token that ends a document can be massive in the middle of a text, and ranges would lose bits."""
    special = [token for token in range(checkpoint.spec.vocab) if token >= 256]
    assert written(checkpoint, 24)[:, 1:].max() < 256
    found = np.unique(written(checkpoint, 24, special=special[1:])[:, 1:])
    assert set(special[1:]) & set(found.tolist()) and special[0] not in found


def test_a_fifth_of_the_windows_goes_on_as_a_conversation(checkpoint):
    windows, alone = written(checkpoint, 8, chat=(70, 71, 72)), written(checkpoint, 8)
    is_chat = (windows[:, 1:4] == [70, 71, 72]).all(axis=1)
    assert is_chat.sum() == WINDOWS_AT_ONCE // CHAT_SHARE and (windows[:, 0] == 256).all()
    assert len(np.unique(windows[is_chat, 4:], axis=0)) == is_chat.sum()  # the model goes on from there
    assert np.array_equal(windows[~is_chat, :2], alone[~is_chat, :2])
    assert written(checkpoint, 3, chat=(70, 71, 72)).shape == (WINDOWS_AT_ONCE, 3)


def test_a_conversation_opens_with_what_its_template_puts_before_the_user():
    body = "{% for each in messages %}<{{ each.role }}>{{ each.content }}</>{% endfor %}"
    assert chat_opening(ChatTemplates(templates={"default": "[BOS]Be kind.\n" + body})) == "[BOS]Be kind.\n<user>"
    assert chat_opening(ChatTemplates(templates={"default": "{{ raise_exception('no') }}"})) == ""
    assert chat_opening(ChatTemplates(templates={"default": "nothing of the message"})) == ""


def test_a_batch_is_what_its_number_says(checkpoint):
    assert np.array_equal(written(checkpoint, 8, 3), written(checkpoint, 8, 3))
    assert not np.array_equal(written(checkpoint, 8, 3), written(checkpoint, 8, 3, number=1))


def test_tokens_are_drawn_with_the_probabilities_of_the_model(checkpoint):
    windows = np.concatenate([written(checkpoint, 3, number=number) for number in range(32)])
    starts, counts = np.unique(windows[:, 1], return_counts=True)
    drawn = expected = 0.0
    for start in starts[np.argsort(counts)[-64:]]:
        (scores,) = Reference(checkpoint, 3).logits([np.array([256, start])])
        chances = np.exp(scores[-1] - np.logaddexp.reduce(scores[-1]))
        likely = np.flatnonzero(chances > np.median(chances))
        mine = windows[windows[:, 1] == start, 2]
        drawn, expected = drawn + np.isin(mine, likely).sum(), expected + len(mine) * chances[likely].sum()
    assert expected > 100 and abs(drawn - expected) < 4 * np.sqrt(expected)
