// What ppsd_rt/pipeline/stop_rules.py describes.
#include <algorithm>

#include "schedule.h"

namespace ppsd {
namespace {

class FixedLength final : public Controller {
 public:
  bool stop(double) override { return false; }
  bool stop_copying(double) override { return false; }
  void observe(const std::vector<Judged>&) override {}
};

class ConfidenceThreshold final : public Controller {
 public:
  explicit ConfidenceThreshold(double threshold) : threshold_(threshold) {}
  bool stop(double confidence) override { return confidence < threshold_; }
  bool stop_copying(double chance) override { return chance < threshold_; }
  void observe(const std::vector<Judged>&) override {}
  bool may_copy(double chance, bool stopped) const override { return !stopped && chance >= threshold_; }
  void set_thresholds(const StopRule& rule) override { threshold_ = rule.threshold; }

 private:
  double threshold_;
};

// Beta(prior + accepted, prior + rejected); only what was observed fades, the prior stays.
struct Posterior {
  double prior_accepted, prior_rejected;
  double accepted = 0.0, rejected = 0.0;

  double draw(NoiseStream& stream) const { return stream.beta(prior_accepted + accepted, prior_rejected + rejected); }
  double mean() const {
    const double yes = prior_accepted + accepted, no = prior_rejected + rejected;
    return yes / (yes + no);
  }
  void count(bool was_accepted) { (was_accepted ? accepted : rejected) += 1.0; }
  void forget(double discount) {
    accepted *= discount;
    rejected *= discount;
  }
};

// A posterior for each bin of confidence.
class Bins {
 public:
  Bins(int bins, double weight) {
    for (int bin = 0; bin < bins; ++bin) {
      const double centre = (bin + 0.5) / bins;
      posteriors_.push_back({weight * centre, weight * (1.0 - centre)});
    }
  }
  Posterior& at(double confidence) {
    const int count = int(posteriors_.size());
    return posteriors_[std::min(int(confidence * count), count - 1)];
  }
  void observe(const std::vector<Judged>& verdict, double discount) {
    for (Posterior& posterior : posteriors_) posterior.forget(discount);
    for (const Judged& judged : verdict) at(judged.confidence).count(judged.accepted);
  }

 private:
  std::vector<Posterior> posteriors_;
};

class Thompson final : public Controller {
 public:
  Thompson(double discount, const Bins& bins, uint64_t seed) : discount_(discount), bins_(bins), stream_(seed) {}

  bool stop(double confidence) override {
    const double drawn = stream_.uniform();
    return drawn >= bins_.at(confidence).draw(stream_);
  }
  bool stop_copying(double chance) override { return stream_.uniform() >= chance; }
  void observe(const std::vector<Judged>& verdict) override { bins_.observe(verdict, discount_); }

 private:
  double discount_;
  Bins bins_;
  NoiseStream stream_;
};

class Survival final : public Controller {
 public:
  explicit Survival(const StopRule& rule) : rule_(rule), bins_(rule.bins, rule.weight) {}

  bool stop(double confidence) override { return draft(bins_.at(confidence).mean()); }
  bool stop_copying(double chance) override { return draft(chance); }
  void observe(const std::vector<Judged>& verdict) override {
    bins_.observe(verdict, rule_.discount);
    alive_ = 1.0;
    drafts_ = 0;
  }
  bool may_copy(double chance, bool) const override {
    return alive_ * chance >= at_place(rule_.copy_thresholds, rule_.copy_threshold);
  }
  void set_thresholds(const StopRule& rule) override { rule_ = rule; }

 private:
  bool draft(double chance) {
    alive_ *= chance;
    ++drafts_;
    return alive_ < at_place(rule_.thresholds, rule_.threshold);
  }
  double at_place(const std::vector<double>& each, double all) const {
    return each.empty() ? all : each[std::min(drafts_, each.size() - 1)];
  }

  StopRule rule_;
  Bins bins_;
  double alive_ = 1.0;   // the chance that all drafts of this chunk are right
  size_t drafts_ = 0;
};

class Paying final : public Controller {
 public:
  explicit Paying(const StopRule& rule) : cost_(rule.cost), discount_(rule.discount), bins_(rule.bins, rule.weight) {}

  bool stop(double confidence) override {
    alive_ *= bins_.at(confidence).mean();
    spent_ += cost_;
    return stops();
  }
  bool stop_copying(double chance) override {
    alive_ *= chance;
    return stops();
  }
  void observe(const std::vector<Judged>& verdict) override {
    bins_.observe(verdict, discount_);
    acceptance_.forget(discount_);
    tokens_ *= discount_;
    time_ *= discount_;
    tokens_ += 1.0;
    time_ += spent_;
    for (const Judged& judged : verdict) {
      acceptance_.count(judged.accepted);
      tokens_ += judged.accepted;
    }
    alive_ = spent_ = 1.0;
  }

 private:
  bool stops() const { return alive_ * acceptance_.mean() < tokens_ / time_ * cost_; }

  double cost_, discount_;
  Bins bins_;
  Posterior acceptance_{1.0, 1.0};
  double tokens_ = 1.0, time_ = 1.0;    // sums in which older passes count less; at first: a plain token
  double alive_ = 1.0, spent_ = 1.0;    // in this chunk
};

}  // namespace

std::unique_ptr<Controller> Controller::make(const StopRule& rule, uint64_t seed) {
  switch (rule.kind) {
    case StopRule::Kind::kConfidence: return std::make_unique<ConfidenceThreshold>(rule.threshold);
    case StopRule::Kind::kBeta: return std::make_unique<Thompson>(rule.discount, Bins(1, 2.0), seed);   // Beta(1, 1), whatever the confidence
    case StopRule::Kind::kCalibrated: return std::make_unique<Thompson>(rule.discount, Bins(rule.bins, rule.weight), seed);
    case StopRule::Kind::kSurvival: return std::make_unique<Survival>(rule);
    case StopRule::Kind::kPaying: return std::make_unique<Paying>(rule);
    case StopRule::Kind::kFixed: break;
  }
  return std::make_unique<FixedLength>();
}

}  // namespace ppsd
