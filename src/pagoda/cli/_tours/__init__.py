"""The tours of `pagoda demo`, one per module. In: a pen, a device; out: text."""
