"""Rewards: what is optimized or judged, one file each.

A new reward is one file here with a class that fulfils ``base.Reward``, and one line in the table; a class of your own
anywhere on the Python path works as "my_module:MyReward" without any table.
"""

REWARDS = {
    "digits": "models.rewards.digits:DigitsReward",
    "jpeg_compressibility": "models.rewards.jpeg:JpegCompressibility",
    "ocr": "models.rewards.ocr:OcrReward",
}
