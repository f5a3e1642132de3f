"""The order of a load: check, plan, transfer, assign, report; by one process or by several."""
