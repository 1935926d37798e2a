"""Many sessions over links that break. Do servers keep anything open?"""
