"""Rewards and judges, one file each.

A new reward is one file here with a class that implements ``base.Reward``, and one line in the table. A custom class or
function anywhere on the Python path works as "my_module:my_reward" without an entry in the table.
"""

from __future__ import annotations

from configs.registry import Table

#: Parameters of a reward function before its options: media, prompts, metadata.
GIVEN = ("media", "prompts", "metadata")
REWARDS = Table(
    {
        "aesthetic": "models.rewards.clip:Aesthetic",
        "clap": "models.rewards.clap:Clap",
        "clip_diversity": "models.rewards.diversity:EmbeddingDiversity",
        "clip_score": "models.rewards.clip:ClipScore",
        "constant": "models.rewards.wrappers:Constant",
        "dina_lrm": "models.rewards.dina_lrm:DinaLrm",
        "digits": "models.rewards.digits:DigitsReward",
        "digits_network": "models.rewards.digits_network:DigitsNetwork",
        "diversity": "models.rewards.diversity:PixelDiversity",
        "edit_reward": "models.rewards.edit:EditReward",
        "exact_text": "models.rewards.exact:ExactText",
        "exposure": "models.rewards.exposure:Exposure",
        "fitted": "models.rewards.fitted:Fitted",
        "geneval": "models.rewards.geneval:GenEval",
        "geneval2": "models.rewards.geneval2:GenEval2",
        "hpsv2": "models.rewards.hpsv2:Hps",
        "hpsv3": "models.rewards.hpsv3:HpsV3",
        "image_similarity": "models.rewards.clip:ImageSimilarity",
        "imagereward": "models.rewards.image_reward:ImageReward",
        "jpeg_compressibility": "models.rewards.jpeg:JpegCompressibility",
        "jpeg_incompressibility": "models.rewards.jpeg:JpegIncompressibility",
        "latent_head": "models.rewards.latents:LatentHead",
        "lexicon": "models.rewards.text:Lexicon",
        "loudness": "models.rewards.loudness:Loudness",
        "ocr": "models.rewards.ocr:OcrReward",
        "pickscore": "models.rewards.clip:PickScore",
        "quality_levels": "models.rewards.quality_levels:QualityLevels",
        "rank": "models.rewards.wrappers:Rank",
        "reasoning_gym": "models.rewards.reasoning:ReasoningGym",
        "sequence_classification": "models.rewards.text:SequenceClassification",
        "video_align": "models.rewards.video_align:VideoAlign",
        "vlm_judge": "models.rewards.vlm:VlmJudge",
        "win_rate": "models.rewards.pairwise:WinRate",
    },
    like="models.rewards.base:Reward",
    functions=True,
)

#: Inputs and layers of rewards that ``flowmill reward fit`` fits.
BACKBONES = Table(
    {
        "clip": "models.rewards.backbones:ClipFeatures",
        "latents": "models.rewards.backbones:FinalLatents",
        "likelihood": "models.rewards.backbones:TextLikelihood",
        "pixels": "models.rewards.backbones:Pixels",
        "text": "models.rewards.backbones:TextFeatures",
    },
    like="models.rewards.backbones:RewardBackbone",
)
