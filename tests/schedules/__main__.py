"""`python -m schedules`."""

import sys

from schedules.campaign import main

if __name__ == "__main__":  # worker processes import this module, too
    sys.exit(main())
