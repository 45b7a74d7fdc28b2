"""A setting that decides the bytes is marked on its field: fingerprint, record and card follow from the mark."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from modelexport.checkpoints.formats.hf import SideFiles
from modelexport.exporting.prepare import prepare
from modelexport.exporting.record import _fingerprint, make_record
from modelexport.inspection.card import model_card
from modelexport.inspection.card import recipe as card_recipe
from modelexport.recipe import ExportRecipe
from modelexport.settings import setting


@dataclass(frozen=True, kw_only=True)
class FlavouredRecipe(ExportRecipe):
    """A recipe with a setting more of each sort."""

    flavour: str = setting("plain", "a setting that decides the bytes", metavar="F", decides_bytes=True)
    colour: str = setting("grey", "a setting that does not", metavar="C")


def test_a_new_setting_is_in_fingerprint_record_and_card(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = FlavouredRecipe(flavour="sweet", colour="red", dry_run=True)
    prepared = prepare(recipe)
    fingerprint = _fingerprint(prepared)
    assert fingerprint["flavour"] == "sweet"
    record = make_record(prepared.plan, recipe, "demo", SideFiles(), {}, {"checks": []})
    assert record["recipe"]["flavour"] == "sweet"
    monkeypatch.setattr(card_recipe, "ExportRecipe", FlavouredRecipe)
    card = model_card(record)
    assert "\nflavour: sweet\n" in card
    assert "colour" not in fingerprint
    assert "colour" not in record["recipe"]
    assert "colour" not in card


def test_a_setting_of_an_algorithm_decides_where_it_is_used() -> None:
    recipe = ExportRecipe(algorithm="gptq", gptq_damping=0.5)
    assert recipe.deciding()["gptq_damping"] == recipe.recorded()["damping"] == 0.5
    assert "awq_grid" not in recipe.deciding()
