"""The stages of a load: plan, check, transfer, assign, report; in one process or several."""
