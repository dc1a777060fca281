"""What models keep between passes: the sources of transformers are searched, and ModelState."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_kvret.commands.models import default_type, type_names
from hf_kvret.models import kept_state
from hf_kvret.models.kept_state import UNKNOWN, ModelState, shifts

from ..pictures import picture_model, picture_prompt

ROOT = Path(transformers.__file__).parent

# How functions begin that no pass and no call of `generate` runs.
SETUP = (
    *("__init__", "_init_weights", "post_init", "set_", "_set_", "tie_", "_tie_", "resize_"),
    *("_resize_", "prune_", "_prune_", "freeze_", "_freeze_", "enable_", "disable_", "load_"),
    *("get_layers", "convert_rope_params", "standardize_rope_params"),
)
CHANGES = {
    *("append", "extend", "insert", "update", "setdefault", "pop", "clear"),
    *("copy_", "fill_", "zero_", "add_", "mul_", "index_copy_", "scatter_"),
}
# Modules that hold what models share.
SHARED = ("modeling_rope_utils.py", "modeling_layers.py")

# The reason, by attribute, why it need not be kept.
SETTINGS = {
    "problem_type": "the kind of loss, set in training",
    "padding_side": "a setting of the caller",
    "_padding_side": "a setting of the caller",
    "do_sample": "a setting of the speaking part, which text does not use",
    "io_same_device": "a setting of accelerate's hooks",
    "expert_capacity": "a setting of the router, the same for all texts",
    "pos_encoding": "a table of all positions, moved to the device",
    "weights": "a table of all positions, which only grows",
    "attention_scaling": "1 at every length where frequencies grow with the text",
    "long_inv_freq": "the same for all long texts; each pass chooses by its own length",
    "original_inv_freq": "the frequencies of a fresh model, moved to the device",
}


def sources() -> dict[Path, list[str]]:
    """Modeling files of types that generate text, with the names of the types."""
    files = defaultdict(list)
    for name in type_names():
        folder = ROOT / "models" / model_type_to_module_name(name)
        for path in folder.glob("modeling_*.py"):
            files[path].append(name)
    return {**{ROOT / name: [] for name in SHARED}, **files}


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a file and methods of its classes, each with the name of its class."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, one) for one in node.body if isinstance(one, ast.FunctionDef))


def changed(function: ast.FunctionDef) -> Iterator[str]:
    """Attributes of ``self`` and its parts that a function sets or changes."""
    for node in ast.walk(function):
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", None), ast.Store):
            yield from attribute_of_self(node)
        elif isinstance(node, ast.Call):
            yield from changed_by_call(node)


def changed_by_call(call: ast.Call) -> Iterator[str]:
    named = {"register_buffer": 0, "setattr": 1, "__setattr__": 0}
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in named and len(call.args) > named[name]:
        text = ast.unparse(call.args[named[name]]).strip("f'\"")
        # `{prefix}inv_freq` has another name for each type of layer.
        yield text.rpartition("}")[2]
    elif name in CHANGES and isinstance(function, ast.Attribute):
        yield from attribute_of_self(function.value)


def attribute_of_self(node: ast.expr) -> Iterator[str]:
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    attribute = getattr(node, "attr", "")
    # The result of a call is another object.
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if attribute and isinstance(node, ast.Name) and node.id in ("self", "module", "model"):
        yield attribute


def modules_of(tree: ast.Module) -> set[str]:
    """Names of the classes in a file but for caches, which are of one conversation."""
    bases = {
        node.name: [ast.unparse(base) for base in node.bases]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }

    def is_cache(name: str) -> bool:
        return "Cache" in name or any(is_cache(base) for base in bases.get(name, []))

    return {name for name in bases if not is_cache(name)}


def findings() -> dict[str, dict[str, set[str]]]:
    """By attribute that passes change: files and functions, and the types that these are of."""
    result: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path, types in sources().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {"", *modules_of(tree)}
        for owner, function in functions(tree):
            if owner in modules and not function.name.startswith(SETUP):
                place = f"{path.name}: {owner}.{function.name}"
                for attribute in changed(function):
                    result[attribute][place] |= set(types)
    return result


def served(types: set[str]) -> bool:
    """Whether any of these types may have a retrieval cache; files without types are of all."""
    return not types or any(not default_type(name).refusal for name in types)


# It parses the sources of some 200 types.
@pytest.mark.slow
def test_everything_that_passes_change_is_kept_or_need_not_be() -> None:
    changes, kept = findings(), {kept_state.SHIFT, kept_state.FREQUENCIES, kept_state.LONGEST}
    unknown = {
        attribute: sorted(place for place, types in places.items() if served(types))
        for attribute, places in changes.items()
        if attribute not in kept | SETTINGS.keys()
    }
    unknown = {attribute: places for attribute, places in unknown.items() if places}
    assert not unknown, "hf_kvret/models/kept_state.py must keep it, or SETTINGS say why not"
    # The search finds what is known.
    shift = changes[kept_state.SHIFT]
    assert any("_prepare_position_ids_for_generation" in place for place in shift)
    assert any("compute_3d_position_ids" in place or "forward" in place for place in shift)
    assert len({name for types in shift.values() for name in types}) >= 20
    assert kept <= changes.keys()


def llama(**rope: object) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
        rope_parameters={"rope_theta": 1e4, **rope},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_a_model_and_its_base_model_name_alike_what_they_keep() -> None:
    assert kept_state.stateful_attributes(llama(rope_type="yarn", factor=2.0)) == ()
    growing, vision = llama(rope_type="dynamic", factor=2.0), picture_model("glm_ocr")
    assert [one.name for one in kept_state.stateful_attributes(growing)] == [
        "rotary_emb.inv_freq",
        "rotary_emb.max_seq_len_cached",
    ]
    assert [one.name for one in kept_state.stateful_attributes(vision)] == ["rope_deltas"]
    assert kept_state.grows(growing) and not kept_state.grows(vision)
    for model in (growing, vision):
        assert kept_state.read_state(model).keys() == kept_state.read_state(model.base_model).keys()


@torch.no_grad()
def test_state_is_written_back_as_it_was_read_or_that_of_a_fresh_model() -> None:
    model, ids = llama(rope_type="dynamic", factor=2.0), torch.arange(64).repeat(4)[None]
    first = model(ids[:, :40]).logits
    unused = kept_state.read_state(model)
    long = model(ids).logits
    grown = kept_state.read_state(model)
    assert int(grown["rotary_emb.max_seq_len_cached"]) == 256
    middle = model(ids[:, :100]).logits
    kept_state.write_state(model, {})
    assert torch.equal(model(ids[:, :40]).logits, first)
    alone = model(ids[:, :100]).logits
    assert not torch.allclose(alone, middle, atol=1e-3)
    kept_state.write_state(model, grown)
    assert torch.equal(model(ids[:, :100]).logits, middle)
    assert torch.equal(model(ids).logits, long)
    kept_state.write_state(model, unused)
    assert torch.equal(model(ids[:, :100]).logits, alone)


def test_frequencies_of_types_of_layers_are_kept_each() -> None:
    module = torch.nn.Module()
    module.rope_type = {"full_attention": "dynamic", "sliding_attention": "default"}
    module.original_max_seq_len = module.max_seq_len_cached = 32
    for kind in module.rope_type:
        module.register_buffer(f"{kind}_inv_freq", torch.ones(4))
        module.register_buffer(f"{kind}_original_inv_freq", torch.ones(4))
    # The length is first made when the frequencies grow.
    names = ["full_attention_inv_freq", "full_attention_max_seq_len_cached"]
    assert list(kept_state.read_state(module)) == names
    assert kept_state.read_state(module)["full_attention_max_seq_len_cached"] == 32
    kept_state.write_state(module, {names[0]: torch.zeros(4), names[1]: 70})
    assert not module.full_attention_inv_freq.any() and module.sliding_attention_inv_freq.all()
    assert module.full_attention_max_seq_len_cached == 70
    kept_state.write_state(module, {})
    assert module.full_attention_inv_freq.all()
    assert module.full_attention_max_seq_len_cached == 32


GRIDS = ((8, 12), (4, 4))


def positions_of(model, inputs):
    """Positions and shift as the model itself computes them for a whole prompt."""
    names = ("mm_token_type_ids", "image_grid_thw", "attention_mask")
    given = {name: inputs[name] for name in names if name in inputs}
    if "image_grid_thw" not in given:
        mask = given["attention_mask"]
        return (mask.cumsum(1) - 1).clamp(0)[None].expand(3, -1, -1), torch.zeros(len(mask), 1)
    return model.model.get_rope_index(inputs["input_ids"], **given)


def cut(model, inputs, length):
    """``inputs`` with the first ``length`` tokens; None where that cuts through a picture."""
    ids, mark = inputs["input_ids"][:, :length], model.config.image_token_id
    part = {name: x[:, :length] for name, x in inputs.items() if x.shape[1] >= 60 and x.ndim == 2}
    part = {name: part[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    inside = ids[0, -1:] == mark and inputs["input_ids"][0, length] == mark
    pictures = int(((ids[0] == mark).int().diff() == 1).sum())
    if pictures:
        part["image_grid_thw"] = inputs["image_grid_thw"][:pictures]
    return None if bool(inside) else part


@pytest.mark.parametrize(
    "name",
    ["qwen2_5_vl", "glm_ocr"]
    + [pytest.param(one, marks=pytest.mark.slow) for one in ("qwen2_vl", "qwen3_vl", "glm4v_moe")],
)
def test_the_shift_at_each_length_is_that_of_the_text_cut_there(name: str) -> None:
    model = picture_model(name)
    inputs = picture_prompt(model, 1, GRIDS)
    positions, shift = positions_of(model, inputs)
    result = shifts(positions, inputs["attention_mask"], 0, None, 1)
    length = inputs["input_ids"].shape[1]
    assert result.shape == (1, length + 1) and result.dtype == torch.int32
    assert result[0, -1] == shift.item()
    known = 0
    for count in range(1, length):
        part = cut(model, inputs, count)
        if part is None:
            assert result[0, count] == UNKNOWN, count
        elif result[0, count] != UNKNOWN:
            assert result[0, count] == positions_of(model, part)[1].item(), count
            known += 1
    pictures = int((inputs["input_ids"] == model.config.image_token_id).sum())
    assert known == length - 1 - pictures + len(GRIDS)


def test_a_later_pass_goes_on_from_the_shift_before_it() -> None:
    """Positions with a row for all rows, and a mask with a hole, as padded second turns have."""
    before = torch.tensor([[-24], [0]])
    mask = torch.ones(2, 50)
    mask[1, 42:45] = 0
    tokens = mask.cumsum(1)[:, 40:] - 1
    result = shifts((tokens + before)[None].long(), mask, 40, before, 2)
    assert result.tolist() == [[-24] * 11, [0] * 11]
    same = shifts(torch.arange(16, 26)[None], None, 40, torch.tensor([[-24]] * 3), 3)
    assert same.tolist() == [[-24] * 11] * 3


NAME = "rope_deltas"
CPU = torch.device("cpu")


def shift(*values: int) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def filled() -> ModelState:
    """10 tokens with pictures at 2 to 5 and 3 to 7, text to 12, and 4 with a picture in one row."""
    state = ModelState()
    unknown = UNKNOWN
    cuts = [
        [0, 0, 0, unknown, unknown, unknown, -2, -2, -2, -2, -2],
        [0, 0, 0, 0, unknown, unknown, unknown, unknown, -3, -3, -3],
    ]
    state.record({NAME: shift(-2, -3)}, 0, 10, 2, torch.tensor(cuts, dtype=torch.int32))
    state.record(state.values(), 10, 12, 2, None)
    later = torch.tensor([[-2, -2, unknown, -4, -4], [-3] * 5], dtype=torch.int32)
    state.record({NAME: shift(-4, -3)}, 12, 16, 2, later)
    return state


def loaded(state: ModelState) -> ModelState:
    twin = ModelState()
    twin.load_state_dict(state.state_dict(), CPU)
    return twin


@pytest.mark.parametrize("copy", [lambda state: state, loaded, ModelState.fork])
def test_a_crop_goes_back_to_the_shift_of_its_length(copy: Callable[..., ModelState]) -> None:
    """One into a picture of any row is refused, until a deeper one."""
    lengths = {20: (-4, -3), 15: (-4, -3), 13: (-2, -3), 9: (-2, -3), 2: (0, 0)}
    for length, values in lengths.items():
        state = copy(filled())
        state.crop(length)
        assert torch.equal(state.values()[NAME], shift(*values))
    for length in (3, 5, 7, 14):
        state = copy(filled())
        state.crop(length)
        for one in (state, copy(state)):
            with pytest.raises(ValueError, match="crop it to a place before the picture"):
                one.values()
        state.crop(2)
        assert torch.equal(state.values()[NAME], shift(0, 0))


def test_a_pass_whose_positions_are_unknown_or_contradict_is_not_cut() -> None:
    for cuts in (None, torch.zeros(1, 6, dtype=torch.int32)):
        state = ModelState()
        state.record({NAME: shift(-2)}, 0, 5, 1, cuts)
        for one in (state, loaded(state)):
            kept = one.fork()
            kept.crop(5)
            assert torch.equal(kept.values()[NAME], shift(-2))
            one.crop(4)
            with pytest.raises(ValueError, match="whose positions it does not know"):
                one.values()


def test_frequencies_stay_through_a_crop_and_go_with_the_last_token() -> None:
    state, values = ModelState(), {"rotary_emb.inv_freq": torch.rand(4)}
    state.record(values, 0, 9, 2, None)
    state.crop(5)
    for one in (state, loaded(state)):
        assert torch.equal(one.values()["rotary_emb.inv_freq"], values["rotary_emb.inv_freq"])
        one.crop(0)
        assert one.values() == {}
