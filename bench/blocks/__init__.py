"""Block managers side by side: one workload, in processes of their own. See README.md."""
