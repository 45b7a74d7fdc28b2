"""A few cases of each kind, in one process that imports torch once; prints what came of them as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from tests.faults import campaign, kills, power_loss
from tests.faults.interposed import run_interposed
from tests.faults.jobs import Workshop


def main(directory: Path) -> None:
    """Runs them."""
    run_interposed(directory, ["-m", "tests.faults._few", str(directory)])
    shop = Workshop(directory / "shop", ["none"])
    faults = campaign.run_campaign(shop, ["none"], 5, seed=0)
    power = power_loss.Outcomes()
    power_loss.check_job(shop, "none", power, Random(0), reruns=2)
    unsynced = power_loss.Outcomes()
    power_loss.check_job(shop, "none", unsynced, Random(0), reruns=0, forgotten="fsync")
    killer = kills.Killer(shop, ["none"])
    for number in range(4):
        killer.kill("none", Random(number))
    found = {
        "faults": faults.as_json(),
        "power": vars(power),
        "unsynced": len(unsynced.defects),
        "kills": killer.outcomes.as_json(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
