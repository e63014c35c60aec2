"""The tours of `pagoda demo`, one idea a file; each is given a pen and a device, and ends by itself."""
