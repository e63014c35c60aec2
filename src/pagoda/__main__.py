"""``python -m pagoda`` is ``pagoda``."""

from pagoda.cli import main

raise SystemExit(main())
