"""Parameters of published models, to the last one."""

import json
import math

import jax
import pytest
import tiny

from moejax.cli.main import main
from moejax.config import AttentionConfig
from moejax.configure import load_config
from moejax.errors import UserError
from moejax.model.decoder import Decoder
from moejax.plan.description import FFN, Description, Group, Layer
from moejax.plan.mixers import Attention
from moejax.plan.parameters import module_counts
from moejax.plan.presets import folder, names, read_model

MODULES = {"mixtral-8x7b", "olmoe-1b-7b", "qwen3-235b-a22b"}
"""Presets that the trainer builds."""

COUNTS = {
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248, 12_748_853_248, 12_617_781_248, 0),
    "dbrx": (131_596_523_520, 36_469_708_800, 35_853_146_112, 35_236_583_424, 0),
    "arctic": (478_584_608_768, 17_318_647_808, 17_089_271_808, 16_859_895_808, 0),
    "olmoe-1b-7b": (6_919_161_856, 1_282_017_280, 1_178_994_688, 1_075_972_096, 0),
    "deepseek-v3": (671_026_404_352, 37_552_282_624, 36_625_603_584, 35_698_924_544, 11_610_067_968),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520, 21_568_433_664, 20_946_103_808, 0),
    "llama-4-maverick": (400_711_848_960, 17_184_691_200, 16_150_205_440, 15_115_719_680, 0),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704, 3_608_307_264, 3_029_173_824, 0),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912, 5_132_849_472, 4_553_716_032, 0),
    "deepseek-v4-pro": (1_572_997_179_491, 49_779_058_787, 48_852_379_747, 47_925_700_707, 25_840_145_595),
    "gemma-4-26b-a4b": (25_233_141_760, 3_822_530_560, 3_084_333_056, 3_084_333_056, 0),
    "glm-5": (743_911_199_232, 41_784_709_632, 40_833_126_912, 39_881_544_192, 9_952_920_320),
    "kimi-k2.5": (1_026_408_209_408, 32_861_477_888, 31_687_072_768, 30_512_667_648, 0),
    "mimo-v2.5-pro": (1_021_248_099_840, 41_894_893_056, 40_957_466_112, 40_020_039_168, 1_934_715_264),
    "minimax-m3": (426_174_565_632, 25_962_466_560, 24_733_273_344, 23_504_080_128, 0),
    "nemotron-3-ultra": (549_308_968_960, 56_058_818_560, 54_985_076_736, 53_911_334_912, 11_215_609_856),
    "qwen3.5-397b-a17b": (396_346_350_336, 17_349_040_896, 16_331_922_176, 15_314_803_456, 0),
    "qwen3.5-35b-a3b": (34_660_610_688, 3_454_988_928, 2_946_429_568, 2_437_870_208, 0),
    "glm-5.2": (743_377_000_704, 41_250_511_104, 40_298_928_384, 39_347_345_664, 9_952_920_320),
    "kimi-k3": (2_779_484_393_568, 105_363_935_328, 104_189_530_208, 103_015_125_088, 0),
}
"""Total, active by three conventions, and multi-token prediction. Totals of 17 are those of the makers' own classes."""


@pytest.fixture(scope="module")
def listed() -> dict[str, dict]:
    """What `moejax params all --json` prints, by preset."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *args: lines.extend(map(str, args)))
        assert main(["params", "all", "--json"]) == 0
    return {item["key"]: item for item in json.loads("\n".join(lines))}


def test_every_preset_is_listed(listed: dict[str, dict]) -> None:
    assert set(listed) == set(COUNTS) == set(names())


@pytest.mark.parametrize("key", COUNTS)
def test_counts(listed: dict[str, dict], key: str) -> None:
    item = listed[key]
    conventions = ("total", "active", "active_without_embedding", "active_without_embedding_and_head", "mtp")
    assert tuple(item[name] for name in conventions) == COUNTS[key]
    assert item["source"] == ("module" if key in MODULES else "description")
    assert sum(item["parts"].values()) == item["total"]
    assert abs(item["total_difference"]) < 0.027
    assert abs(item["active_difference"]) < 0.0223


def test_table_names_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", "deepseek-v3"]) == 0
    out = capsys.readouterr().out
    assert "671,026,404,352" in out
    assert "description" in out


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'mixtral-8x7b'"):
        read_model("mixtral-7x8b")


def test_a_description_is_no_run() -> None:
    with pytest.raises(UserError, match="cannot build yet; see 'moejax params"):
        load_config(folder() / "dbrx.yaml")


@pytest.mark.parametrize("norm", ["none", "head", "full"])
def test_a_description_counts_what_the_module_has(norm) -> None:
    attention = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=4, qk_norm=norm)
    run = tiny.config(model=tiny.dataclasses.replace(tiny.MODEL, attention=attention))
    model = run.model
    mixer = Attention(num_heads=6, num_kv_heads=2, head_dim=4, qk_norm=norm)
    moe = FFN(num_experts=8, top_k=2, expert_dim=24, shared_dim=16)
    groups = (Group(1, (Layer(mixer, FFN(dense_dim=40)),)), Group(2, (Layer(mixer, moe),)))
    described, counted = Description(model.vocab_size, model.d_model, groups).counts(), module_counts(run)
    assert described.as_dict() == counted.as_dict()
    assert counted.total == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(Decoder(run).shapes))
