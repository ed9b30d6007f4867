"""`python -m ppsd_rt` is `ppsd-run`."""

import sys

from .cli.main import main

sys.exit(main())
