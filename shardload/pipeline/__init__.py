"""The stages of a load: check, plan, transfer, assign, report; in one process or several."""
