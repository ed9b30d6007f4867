"""`python -m campaign`, as a command of ppsd-run's kind."""

import sys

from campaign.command import CAMPAIGN
from ppsd_rt.cli import ranks
from ppsd_rt.cli.commands import COMMANDS
from ppsd_rt.cli.main import main

COMMANDS["campaign"] = CAMPAIGN
ranks.OVER_RANKS += ("campaign",)
sys.argv.insert(1, "campaign")
sys.exit(main())
