"""What a run's file may not say: refused in a sentence for each thing that is wrong, all of them at once.

What files mean: test_run_config.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from quartet.config import ConfigError
from quartet.local.toml_text import dumps
from quartet.run.config import parse_run

ENV = '[[env]]\nid = "reverse-text"\n'


@pytest.mark.parametrize(
    ("lines", "table", "sentence"),
    [
        ("batch_size = 100", "", "rollouts_per_example = 8 does not divide it; set it to 96 or 104"),
        ("batch_size = 4", "", "set it to 8"),
        ("bacth_size = 8", "", "unknown key 'bacth_size'; did you mean 'batch_size'?"),
        ("max_steps = true", "", "max_steps = true is refused: should be a whole number"),
        ('max_steps = "8"', "", "max_steps = '8' is refused: should be a whole number"),
        ("max_steps = -1", "", "max_steps = -1 is refused"),
        ("learning_rate = nan", "", "learning_rate = nan is refused"),
        ("learning_rate = -1.0", "", "learning_rate = -1.0 is refused"),
        ("adam_beta2 = 1.0", "", "adam_beta2 = 1.0 is refused"),
        ("warmup_steps = 101", "", "warmup_steps = 101 is refused: the run ends before, at max_steps = 100"),
        ("max_concurrent = 7", "", "max_concurrent = 7 is refused: a group has rollouts_per_example = 8"),
        ("max_off_policy_steps = 25", "", "max_off_policy_steps = 25 is refused: should be less"),
        ('optimizer = "adam"', "", "optimizer = 'adam' is refused: should be 'adamw'"),
        ("momentum = 0.5", "", 'momentum belongs to optimizer = "sgd" or "muon"'),
        ("freeze_routers = true", "[lora]\nenabled = true", "freeze_routers is for whole models"),
        ("adamw_learning_rate = 0.5", "", 'adamw_learning_rate belongs to optimizer = "muon"'),
        ('optimizer = "muon"\nadamw_learning_rate = 0', "", "adamw_learning_rate = 0 is refused: vectors"),
        ("", "[algorithm]\nclip_high = 101.0", "clip_high = 101.0 is refused: no ratio gets there"),
        ("", '[algorithm]\nloss = "dppo"\nclip_high = 1.0', "a probability moves by less than 1"),
        ("", '[algorithm]\nloss = "sapo"\ntau_positive = 101.0', "tau_positive = 101.0 is refused: the gate"),
        ("", '[algorithm]\nloss = "sapo"\ntau_negative = 101.0', "tau_negative = 101.0 is refused: the gate"),
        ("decay_steps = 5", "", "decay_steps = 5 belongs to lr_scheduler"),
        ('lr_scheduler = "linear"\nwarmup_steps = 100', "", "leaves none after warmup_steps = 100"),
        ("min_lr = 1e-7", "", "min_lr = 1e-07 is where a rate ends that falls, and lr_scheduler ="),
        ('lr_scheduler = "cosine"\nmin_lr = 1e-6', "", "min_lr = 1e-06 is not below learning_rate = 1e-06"),
        ("min_lr = -1.0", "", "min_lr = -1.0 is refused"),
        ("adam_epsilon = 0.0", "", "adam_epsilon = 0.0 is refused"),
        ('optimizer = "sgd"\nadam_epsilon = 1e-6', "", "adam_epsilon = 1e-06 belongs to optimizer ="),
        ("min_lr_ratio = 0.1", "", "unknown key 'min_lr_ratio'; set 'min_lr', a rate and no share of one"),
        ('lr_scheduler = "warmup_stable_decay"', "", "needs decay_steps from 1 to 100"),
        ('lr_scheduler = "warmup_stable_decay"\nwarmup_steps = 60\ndecay_steps = 41', "", "from 1 to 40"),
        ("", "[lora]\nr = 0", "lora.r = 0 is refused"),
        ("", '[lora]\nenabled = true\ntarget_modules = "q"', "target_modules = 'q' is refused: should be a"),
        ("", "[lora]\nrank = 8", "unknown key 'lora.rank'; it is called 'lora.r' here"),
        ("num-generations = 8", "", "'num_generations'; it is called 'rollouts_per_example' here"),
        ("", "[optim]\nlr = 1e-5", "unknown key 'optim'; 'optimizer' (its type), 'learning_rate',"),
        ("", "[optimizer]\nlr = 1e-5", "optimizer = {'lr': 1e-05} is refused: it is no table here; "),
        ("", '[optimizer]\ntype = "adamw"', "here; 'optimizer' (its type), 'learning_rate', 'weight_decay',"),
        ("", '[lr_scheduler]\ntype = "cosine"', "is no table here; 'lr_scheduler' (its type), 'warmup_"),
        ("", "[learning_rate]\nvalue = 1e-5", "is refused: should be a number, not a table"),
        ("", "[sampling]\ntemp = 1", "unknown key 'sampling.temp'; did you mean 'sampling.temperature'?"),
        ("", "[sampling]\nnothing_like_it = 1", "unknown key 'sampling.nothing_like_it'; known keys here: "),
        ("mini_batch_size = 8", "", "unknown key 'mini_batch_size'; set 'algorithm.num_minibatches', into"),
        ("", '[algorithm]\nadv_estimator = "grpo"', "'algorithm.adv_estimator'; set 'algorithm.preset'"),
        ("", "[critic]\nlr = 1e-5", "unknown key 'critic'; there is no critic: rollouts of one task are"),
        ("", "[trainer]\ntotal_epochs = 3", "'total_epochs' is no key of [trainer]; set 'max_steps', of"),
        ("", "[lora]\ndropout = 1.0", "lora.dropout = 1.0 is refused"),
        ("", '[lora]\nenabled = true\nmodules_to_save = ["norm"]', "modules_to_save are no part of a served"),
        ('lr_scheduler = "step"', "", "lr_scheduler = 'step' is refused: should be 'constant'"),
        ("", "weight = 0", "env.0.weight = 0 is refused: should be greater than 0"),
        ("", "wieght = 1", "unknown key 'env.0.wieght'; did you mean 'env.0.weight'?"),
        ("", ENV, "two are called 'reverse-text'; give each a name"),
        ("", "timeout_seconds = 0", "env.0.timeout_seconds = 0 is refused"),
        ("", "timeout_seconds = 1e300", "env.0.timeout_seconds = 1e+300 is refused: should be less"),
        ("", "timeout_seconds = 0.0001", "env.0.timeout_seconds = 0.0001 is refused: should be greater"),
        ("", "max_retries = 17", "env.0.max_retries = 17 is refused: should be less than or equal to 16"),
        ("rollouts_per_example = 1025", "", "rollouts_per_example = 1025 is refused: should be less"),
        ("", "[eval]\nrollouts_per_example = 1025", "eval.rollouts_per_example = 1025 is refused"),
        ("max_concurrent = 8", "[eval]\nrollouts_per_example = 9",
         "max_concurrent = 8 is less than eval.rollouts_per_example = 9, which run together"),
        ("rollouts_per_example = 1", "", "rollouts_per_example = 1 is refused: algorithm.advantage = 'grpo'"),
        ("", '[algorithm]\nadvantage = "dr_grpo"', "sampling.max_tokens is not set"),
        ("", "".join(f'[[env]]\nid = "{n}"\n' for n in range(100)), "at most 100 items"),
        ("", "[sampling]\ntemperature = 0", "sampling.temperature = 0 is refused: a greedy group"),
        ("", "[sampling]\ntemperature = nan", "sampling.temperature = nan is refused: should"),
        ("", "[sampling]\ntemperature = 0.009", "temperature = 0.009 is refused: choose 0.01 to 100"),
        ("", "[sampling]\ntemperature = 101", "sampling.temperature = 101 is refused: choose 0.01 to 100"),
        ("", "[sampling]\nrepetition_penalty = 0.001", "sampling.repetition_penalty = 0.001 is refused"),
        ("", "[sampling]\nrepetition_penalty = 101", "sampling.repetition_penalty = 101 is refused"),
        ("", f'[sampling]\nstop = ["{"x" * 1025}"]', "at most 1024 characters"),
        ("", "[eval]\ntemperature = 0.009", "eval.temperature = 0.009 is refused: choose 0 for greedy"),
        ("", "[sampling]\ntop_p = 0", "sampling.top_p = 0 is refused: should be greater than 0"),
        ("", "[sampling]\ntop_p = 1.1", "sampling.top_p = 1.1 is refused"),
        ("", "[sampling]\nmin_p = -0.1", "sampling.min_p = -0.1 is refused"),
        ("", "[sampling]\nfrequency_penalty = 3", "sampling.frequency_penalty = 3 is refused"),
        ("", "[sampling]\nmax_tokens = 0", "sampling.max_tokens = 0 is refused"),
        ("", '[sampling]\nstop = [""]', "an empty stop string ends every rollout at once; remove it"),
        ("", f"[sampling]\nstop = {['x'] * 17}", "at most 16 items"),
        ("", '[algorithm]\nadvantage = "gae"', "algorithm.advantage = 'gae' is refused: should be 'grpo'"),
        ("", "[algorithm]\nepsillon = 0.2", "did you mean 'algorithm.epsilon'?"),
        ("", "[algorithm]\nclip_low = 0.2", 'loss = "cispo" has only clip_high (epsilon_high)'),
        ("", '[algorithm]\nloss = "none"\nclip_high = 2', 'loss = "none" does not clip'),
        ("", '[algorithm]\nloss = "none"\nclip_low = 0.1', 'remove it, or choose "ppo" or "dppo"'),
        ("", '[algorithm]\nloss = "dppo"\nclip_low = 1.0', "a probability moves by less than 1, so it would"),
        ("", '[algorithm]\nloss = "ppo"\nclip_low = 1.5', "set it below 1"),
        ("", "[eval]\ninterval = 5\nnum_examples = 0", "eval.interval = 5 has nothing to evaluate"),
        ("", '[algorithm]\npreset = "gpro"', "algorithm.preset = 'gpro' is refused: should be 'grpo'"),
        ("", '[algorithm]\nloss = "ppo"\nbeta = 0.1\nkl_coef = 0.1', "beta is another name of kl_coef"),
        ("", '[algorithm]\nloss = "cispo"\ndelta = 4', 'delta = 4.0 bounds the ratio of loss = "ppo"'),
        ("", '[algorithm]\nloss = "none"\ndelta = 4\nproximal = true',
         'delta = 4.0, proximal = true belong to the importance ratio, which loss = "none" has not; remove '
         "them, or choose a loss that has it"),
        ("", '[algorithm]\npreset = "grpo"\ndelta = 1.1', "delta = 1.1 is not above 1 + clip_high"),
        ("", '[algorithm]\npreset = "sapo"\nclip_high = 0.2', "has tau_positive and tau_negative; remove it"),
        ("", '[algorithm]\npreset = "grpo"\ntau_negative = 2', 
         'tau_negative = 2.0 is for loss = "sapo", not for "ppo"; remove it, or choose that'),
        ("", '[algorithm]\npreset = "sapo"\ntau_pos = 2', "it is called 'algorithm.tau_positive' here"),
        ("", '[algorithm]\nimportance_sampling_level = "sequence"', 
         "it is called 'algorithm.ratio_level' here"),
        ("", '[algorithm]\nscale_rewards = "batch"', "set 'algorithm.advantage': dr_grpo does not divide by"),
        ("", "[algorithm]\nref_model_sync_steps = 4", 
         "set 'algorithm.reference.sync_steps' and 'mixup_alpha'"),
        ("", '[algorithm]\npreset = "opd"\nreference = { address = "nohost" }',
         "algorithm.reference.address = 'nohost' is refused: it has no port; write host:port"),
        ("", '[algorithm]\ndistill = true\nloss = "cross_entropy"\nreference = { model = "t" }',
         'distill = true gives advantages to a policy gradient, which loss = "cross_entropy" is not; remove'),
        ('optimizer = "muon"\nlearning_rate = 0.0\nadamw_learning_rate = 0.1', "",
         "adamw_learning_rate = 0.1 keeps its proportion to learning_rate, which is 0; set that above 0"),
        ("", '[algorithm]\npreset = "vespo"\nclip_high = 0.2', "does not clip, it has a kernel; remove it"),
        ("max_steps = 4_000_000_000", "[algorithm]\nnum_iterations = 2",
         "are more than the 4294967295 that can be counted; set max_steps to at most 2147483647"),
        ("", "[algorithm]\nkernel = {}", 'kernel is for loss = "vespo", not for "cispo"'),
        ("", '[algorithm]\npreset = "vespo"\nkernel = { k_negative = 0 }', "algorithm.kernel.k_negative = 0"),
        ("", '[algorithm]\npreset = "vespo"\nratio_level = "sequence"', "not its mean; remove ratio_level"),
        ("", '[algorithm]\npreset = "vespo"\nproximal = true\ncorrection = { mode = "mask" }',
         "remove correction and proximal"),
        ("", "[algorithm]\nkl_weighted = true", "kl_weighted belongs to kl_coef, which is 0"),
        ("", '[algorithm]\nloss = "none"\nkl_coef = 1\nkl_weighted = true', 'which loss = "none" has not'),
        ("", "[algorithm]\noff_policy_mask = 0.0", "algorithm.off_policy_mask = 0.0 is refused"),
        ("", '[algorithm]\npreset = "sft"\noff_policy_mask = 0.1', 'which loss = "cross_entropy" has not'),
        ("", '[algorithm]\npreset = "sft"\ntop_entropy_quantile = 0.1', "is not; remove it"),
        ("", "[algorithm]\ntop_entropy_quantile = 1.0", "algorithm.top_entropy_quantile = 1.0 is refused"),
        ("", "[algorithm]\nentropy_coef_delta = 0.1", "belongs to target_entropy; give both"),
        ("", "[algorithm]\ntarget_entropy = 0.2\nentropy_coef = -0.1", "within 0 and 1; begin in there"),
        ("", "[algorithm]\nentropy_target = 0.2", "it is called 'algorithm.target_entropy' here"),
        ("", '[algorithm]\nloss = "dppo"\nratio_level = "sequence"', 'set ratio_level to "token"'),
        ("", '[algorithm]\nloss = "none"\nratio_level = "sequence"', 'which loss = "none" has not'),
        ("", '[algorithm]\ncorrection = { mode = "mask" }', "set proximal to true"),
        ("", '[algorithm]\nproximal = true\ncorrection = { mode = "truncate", floor = 0.5 }',
         'floor belongs to mode = "mask"'),
        ("", "[algorithm]\ntarget_kl = 0.1", "set a kl_coef above 0 to begin with"),
        ("", '[algorithm]\nkl_estimator = "k2"', "belongs to kl_coef, which is 0"),
        ("", "[algorithm]\nreference = { sync_steps = 2 }", "reference is not read"),
        ("", "[algorithm]\nkl_coef = 1\nreference = { mixup_alpha = 0.5 }", "set sync_steps above 0"),
        ("", '[algorithm]\nkl_coef = 1\nreference = { model = "m", sync_steps = 2 }', "leave out sync_steps"),
        ("", '[algorithm]\npreset = "opd"', "distill needs a teacher"),
        ("", '[algorithm]\npreset = "opd"\nloss = "cross_entropy"', "a policy gradient, which"),
        ("", '[algorithm]\nadvantage = "zero"', "leaves nothing to learn from"),
        ("", '[algorithm]\nloss = "custom"', "give both or neither"),
        ("", '[algorithm]\nadvantage = "custom"', "custom_advantage names the function of advantage"),
        ("", '[algorithm]\ncustom_advantage = "mine"', "custom_advantage names the function of advantage"),
        ("", "[algorithm]\ncustom_args = { tau = 0.1 }", 'given to the function of loss = "custom"'),
        ("", '[algorithm]\nloss = "custom"\ncustom = "m"\ncustom_args = { tau = [0.1] }',
         "custom_args.tau = [0.1] is no number, text or boolean"),
        ("", '[algorithm]\nloss = "custom"\ncustom = "m"\ncustom_args = { t = nan }', "custom_args.t = nan"),
        ("", '[algorithm]\nloss = "custom"\ncustom = "m"\ncustom_args = { "a-b" = 1 }',
         "custom_args.a-b: a function takes nothing of that name"),
        ("", '[orchestrator.advantage]\ntype = "custom"', "a function of your own is orchestrator"),
        ("", '[algorithm]\naggregation = "constant"', "sampling.max_tokens is not set"),
        ("", "[algorithm]\nconstant_tokens = 9", 'constant_tokens belongs to aggregation = "constant"'),
        ("", '[sampling]\ntemperature = 0.7\n[algorithm]\npreset = "opd"\nreference = { address = "h:1" }',
         "sampling.temperature = 0.7 is refused: algorithm.reference.address scores at temperature 1"),
        ("", "[ckpt]\ninterval = 0", "ckpt.interval = 0 is refused"),
        ("", "[ckpt]\nkeep_interval = 0", "ckpt.keep_interval = 0 is refused"),
        ("", "[ckpt]\nkeep_interval = 25", "keep_interval = 25 is no multiple of that; set it to 20 or 30,"),
        ("", "[ckpt]\nkeep_interval = 4", "no multiple of that; set it to 10, or interval to a divisor"),
        ("gradient_accumulation_steps = 4", "", "gradient_accumulation_steps = 4 is refused: batch_size"),
        ("", "[kl_penalty]\nenabled = true\nbeta = 0", "kl_penalty.beta = 0 is refused: should be greater"),
        ("", "[kl_penalty]\nenabled = true\nbeta = 0.2\n[algorithm]\nkl_coef = 0.1",
         "kl_penalty.beta = 0.2 and algorithm.kl_coef = 0.1 are one setting"),
        ("", "[difficulty_filter]\nenabled = true\nmin_reward = 0.9\nmax_reward = 0.5", "leave nothing"),
        ("", "[difficulty_filter]\nmax_reward = nan", "difficulty_filter.max_reward = nan is refused"),
        ("", "[difficulty_filter]\nenabled = true\n[algorithm]\ndynamic_sampling = true\nmax_resample = 3",
         "set difficulty_filter.max_resample"),
        ("", '[difficulty_filter]\nenabled=true\nmin_reward_variance = 0.1\n[algorithm]\nadvantage = "none"',
         "min_reward_variance = 0.1 looks for rewards that differ"),
        ("", "[checks]\nverify_logprobs = true\n[sampling]\nrepetition_penalty = 1.1",
         "sampling.repetition_penalty = 1.1 makes log-probabilities that the trainer cannot verify"),
        ("", "[sampling]\nmin_tokens = -1", "sampling.min_tokens = -1 is refused"),
        ("", "[sampling]\nmin_tokens = 9\nmax_tokens = 8",
         "min_tokens = 9 is more than max_tokens = 8, where an answer ends; set min_tokens to at most 8, or"),
        ("", "sampling = { min_tokens = 9 }\n[sampling]\nmax_tokens = 8",
         "of the environment 'reverse-text': min_tokens = 9 is more than max_tokens = 8"),
        ("", "[sampling]\nmin_tokens = 9\n[eval.sampling]\nmax_tokens = 8",
         "of the evaluation of 'reverse-text': min_tokens = 9 is more than max_tokens = 8"),
        ("", "[sampling]\nmin_new_tokens = 9", "min_tokens"),
        ("trainer = 3", "", "trainer = 3 is refused: should be a table"),
        ("", "[trainer.optim]\nlr = 1e-5\nx = 1", "'optim' is no key of [trainer]; 'optimizer' (its type), "),
        ("", "[trainer.optim]\nlr = 1e-5",
         "'optim.lr' is no key of [trainer]; set 'learning_rate' at the top of the file, or write '--l"),
        ("", "args = { bug = nan }",
         "env.0.args.bug = nan is refused: should be a finite number; the text is \"nan\" in a file, "),
        ("", "args = { of = [1, { seed = -inf }] }", "env.0.args.of.1.seed = -inf is refused: should"),
        ("", '[[eval.env]]\nid = "e"\nargs = { a = inf }', "eval.env.0.args.a = inf is refused: should"),
        ("", "[inference.vllm.args]\nswap = nan", "inference.vllm.args.swap = nan is refused: should"),
        ("", "args = { since = 2026-01-02 }",
         "env.0.args.since = datetime.date(2026, 1, 2) is refused: should be text in quotes; the text is "),
        ("", "[inference.vllm.args]\nat = [08:30:00]", 'should be text in quotes; the text is "08:30:00" in'),
        ("", "[trainer.optimizer]\nlr = 1", "'optimizer' is no key of [trainer]; 'optimizer' (its type), "),
        ("", "[trainer]\nlr = 1e-5", "'lr' is no key of [trainer]; set 'learning_rate' at the top"),
        ("", "[orchestrator]\nbatch-size = 8", "'batch_size' is no key of [orchestrator]; it stands at the"),
        ("", '[orchestrator.model]\nname = "x"', "'model' is no key of [orchestrator]; set 'model' at the"),
        ("", '[orchestrator.environment]\nid = "x"',
         "'environment' is no key of [orchestrator]; write [[env]]"),
        ("", '[inference.model]\nname = "x"', "'model.name' is no key of [inference]; set 'model' at"),
        ("", "num_examples = 5", "'env.0.num_examples'; what the environment itself takes stands in"),
        ("", "max_steps = 5", "unknown key 'env.0.max_steps'; 'max_steps' belongs above the first table of"),
        ("", "ratio = 5", "unknown key 'env.0.ratio'; it is called 'env.0.weight' here"),
        ("", '[weight_broadcast]\ntype = "nccl"', "unknown key 'weight_broadcast'; weights travel over gRPC"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_sentence(lines: str, table: str, sentence: str) -> None:
    """run/config.py 1, learning.py 1 and 2, algorithm.py 3, ratio.py 1 and 2, credit.py 1, model.py 1-3."""
    with pytest.raises(ConfigError) as caught:
        parse_run(f'model = "m"\n{lines}\n{ENV}{table}')
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_with_many_mistakes_is_refused_once() -> None:
    """run/config.py 2: keys of others, of no one, of another type; not that [[env]] is missing."""
    text = """
    model = "m"
    policy_lr = 1e-5
    [[orchestrator.env]]
    id = "reverse-text"
    [algorithm]
    presett = "grpo"
    [sampling]
    max_tokens = "3"
    [trainer]
    lr = 1
    seq-len = 4
    """
    with pytest.raises(ConfigError) as caught:
        parse_run(text)
    assert [str(one) for one in caught.value.each] == [
        "unknown key 'policy_lr'; it is called 'learning_rate' here",
        "unknown key 'algorithm.presett'; did you mean 'algorithm.preset'?",
        "'lr' is no key of [trainer]; set 'learning_rate' at the top of the file, or write '--learning-rate "
        "VALUE'",
        "'seq_len' is no key of [trainer]; set 'max_model_len' in the table [inference], or "
        "'sampling.max_tokens'",
        "'env' is no key of [orchestrator]; write [[env]] alone, for each environment",
        "sampling.max_tokens = '3' is refused: should be a whole number",
    ]
    assert [one.key for one in caught.value.each][2:4] == ["trainer.lr", "trainer.seq_len"]


def test_keys_that_do_not_agree_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(
            f'model = "m"\nmomentum = 0.5\ndecay_steps = 3\n{ENV}[eval]\nnum_examples = 0\ninterval = 5\n'
            '[kl_penalty]\nenabled = true\ntarget_kl = 0.1\n[algorithm]\nkl_coef = 0.7\nloss = "ppo"'
        )
    told = ["kl_penalty.beta", "decay_steps", "momentum", "eval.interval"]
    assert [str(one).split(" ")[0] for one in caught.value.each] == told


def test_what_is_wrong_with_an_algorithm_is_told_with_all_else() -> None:
    """model.py 4: of each of its keys, and beside what does not agree at the top. Values stay short."""
    with pytest.raises(ConfigError) as caught:
        parse_run(
            f'model = "m"\nmomentum = 0.5\n{ENV}[algorithm]\nloss = "ppo"\ntau_positive = 2.0\ndelta = 1.0\n'
            'kernel = { k_positive = 1.0 }\ntarget_kl = 0.1\ncorrection = { mode = "truncate", floor = 0.5 }'
        )
    told = [
        (one.key, str(one).removeprefix(f"{one.key} is refused: ").split()[0]) for one in caught.value.each
    ]
    assert told == [
        ("", "momentum"),
        ("algorithm", "delta"),
        ("algorithm", "tau_positive"),
        ("algorithm", "kernel"),
        ("algorithm", "correction"),
        ("algorithm", "target_kl"),
        ("algorithm.correction", "floor"),
    ]
    assert max(len(str(one)) for one in caught.value.each) < 130


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('model = "m"', "a run needs an environment; add a table [[env]]"),
        ('model = "m"\n[env]\nid = "x"', "write [[env]] with two brackets"),
        (ENV, "required key 'model' is not set"),
        ("model =", "the run is not valid TOML"),
        pytest.param("a = " + "[" * 100_000, "the run is nested too deeply", id="nested"),
        ('model = ""\n' + ENV, "model = '' is refused"),
    ],
)
def test_a_run_without_its_essentials_says_what_to_add(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(text)
    assert sentence in str(caught.value)


def test_every_setting_of_a_kind_that_is_refused_is_named() -> None:
    """And nothing advises to mend what is to be removed."""
    text = f'model = "m"\nexternal_trainer = true\nlearning_rate = 1e-3\ndecay_steps = 2\n{ENV}'
    with pytest.raises(
        ConfigError, match=r"^learning_rate, decay_steps are settings of Quartet's trainer"
    ) as one:
        parse_run(text)
    assert len(str(one.value).splitlines()) == 1
    penalties = (
        "[sampling]\npresence_penalty = 1.0\nfrequency_penalty = 1.0\n[checks]\nverify_logprobs = true\n"
    )
    named = r"sampling\.presence_penalty = 1\.0 and sampling\.frequency_penalty = 1\.0 make"
    with pytest.raises(ConfigError, match=named):
        parse_run(f'model = "m"\n{ENV}\n{penalties}')


@pytest.mark.parametrize(
    "said",
    ["learning_rate = 1e-5", "[lora]\nenabled = true", "[ckpt]\ninterval = 3", '[trainer]\nstate_dir = "x"'],
)
def test_a_run_with_an_external_trainer_says_nothing_that_only_a_trainer_reads(said: str) -> None:
    key = said.strip("[").replace("]", " ").split()[0]
    own = f'model = "m"\nexternal_trainer = true\n{"" if said.startswith("[") else said}\n{ENV}'
    with pytest.raises(ConfigError, match=f"{key} is a setting of Quartet's trainer"):
        parse_run(own + (said if said.startswith("[") else ""))
    # What a client submits has every key, its default too.
    plain = parse_run(f'model = "m"\nexternal_trainer = true\n{ENV}')
    assert parse_run(dumps(plain.model_dump(mode="json", exclude_none=True))) == plain


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"lora": {"r": 8}},
            "r is set, and the table is off; write enabled = true beside it, or remove the table$",
        ),
        ({"difficulty_filter": {"max_reward": 0.9}}, "max_reward is set, and the table is off"),
        ({"kl_penalty": {"beta": 0.2}}, "beta is set, and the table is off"),
    ],
)
def test_a_table_that_does_not_say_whether_it_is_on_is_refused(table: dict[str, Any], said: str) -> None:
    """switched.py: without effect, in silence, is what nobody wants of `[lora] r = 8`."""
    ((name, keys),) = table.items()
    with pytest.raises(ConfigError, match=said):
        parse_run('model = "m"\n' + ENV + dumps(table))
    for enabled in (False, True):
        run = parse_run('model = "m"\n' + ENV + dumps({name: {"enabled": enabled, **keys}}))
        assert getattr(run, name).enabled is enabled


def test_all_that_is_wrong_of_such_a_table_is_told() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_run('model = "m"\n' + ENV + '[lora]\nmodules_to_save = ["norm"]')
    said = [str(one).partition("refused: ")[2] for one in refused.value.each]
    assert [one.split(" ", 2)[:2] for one in said] == [["modules_to_save", "is"], ["modules_to_save", "are"]]
