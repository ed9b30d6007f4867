"""How this program starts itself."""

import sys

# -P: else modules of the working folder, which may be anybody's, would come before Python's and ours.
OWN = (sys.executable, "-P", "-m", "ppsd_rt")
