"""`python -m fuzzing`."""

import sys

from fuzzing.campaign import main

if __name__ == "__main__":  # worker processes import this module, too
    sys.exit(main())
