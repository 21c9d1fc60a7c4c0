"""`python -m atoll.sim.dst`."""

import sys

from atoll.sim.dst.campaign import main

sys.exit(main())
