"""Rewards and judges, one file each.

A new reward is one file here with a class that implements ``base.Reward``, and one line in the table. A custom class or
function anywhere on the Python path works as "my_module:my_reward" without an entry in the table.
"""

from flowmill.configs.registry import Table

#: Parameters of a reward function before its options: media, prompts, metadata.
ARGUMENTS = ("media", "prompts", "metadata")
REWARDS = Table(
    {
        "aesthetic": "flowmill.models.rewards.clip:Aesthetic",
        "clap": "flowmill.models.rewards.clap:Clap",
        "clip_diversity": "flowmill.models.rewards.diversity:EmbeddingDiversity",
        "clip_score": "flowmill.models.rewards.clip:ClipScore",
        "constant": "flowmill.models.rewards.wrappers:Constant",
        "dina_lrm": "flowmill.models.rewards.dina_lrm:DinaLrm",
        "digits": "flowmill.models.rewards.digits:DigitsReward",
        "digits_network": "flowmill.models.rewards.digits_network:DigitsNetwork",
        "diversity": "flowmill.models.rewards.diversity:PixelDiversity",
        "edit_reward": "flowmill.models.rewards.edit:EditReward",
        "exact_text": "flowmill.models.rewards.exact:ExactText",
        "exposure": "flowmill.models.rewards.exposure:Exposure",
        "fitted": "flowmill.models.rewards.fitted:Fitted",
        "geneval": "flowmill.models.rewards.geneval:GenEval",
        "geneval2": "flowmill.models.rewards.geneval2:GenEval2",
        "hpsv2": "flowmill.models.rewards.hpsv2:Hps",
        "hpsv3": "flowmill.models.rewards.hpsv3:HpsV3",
        "image_similarity": "flowmill.models.rewards.clip:ImageSimilarity",
        "imagereward": "flowmill.models.rewards.image_reward:ImageReward",
        "jpeg_compressibility": "flowmill.models.rewards.jpeg:JpegCompressibility",
        "jpeg_incompressibility": "flowmill.models.rewards.jpeg:JpegIncompressibility",
        "latent_head": "flowmill.models.rewards.latents:LatentHead",
        "lexicon": "flowmill.models.rewards.text:Lexicon",
        "loudness": "flowmill.models.rewards.loudness:Loudness",
        "ocr": "flowmill.models.rewards.ocr:OcrReward",
        "pickscore": "flowmill.models.rewards.clip:PickScore",
        "quality_levels": "flowmill.models.rewards.quality_levels:QualityLevels",
        "rank": "flowmill.models.rewards.wrappers:Rank",
        "reasoning_gym": "flowmill.models.rewards.reasoning:ReasoningGym",
        "sequence_classification": "flowmill.models.rewards.text:SequenceClassification",
        "video_align": "flowmill.models.rewards.video_align:VideoAlign",
        "vlm_judge": "flowmill.models.rewards.vlm:VlmJudge",
        "win_rate": "flowmill.models.rewards.pairwise:WinRate",
    },
    like="flowmill.models.rewards.base:Reward",
    functions=True,
)

#: Inputs and layers of rewards that ``flowmill reward fit`` fits.
BACKBONES = Table(
    {
        "clip": "flowmill.models.rewards.backbones:ClipFeatures",
        "latents": "flowmill.models.rewards.backbones:FinalLatents",
        "likelihood": "flowmill.models.rewards.backbones:TextLikelihood",
        "pixels": "flowmill.models.rewards.backbones:Pixels",
        "text": "flowmill.models.rewards.backbones:TextFeatures",
    },
    like="flowmill.models.rewards.backbones:RewardBackbone",
)
