// Twins of the controllers in ppsd_rt/stop_rules.py, compared with them draw by draw.
#include <algorithm>

#include "schedule.h"

namespace ppsd {
namespace {

class FixedLength final : public Controller {
 public:
  bool stop(double) override { return false; }
  void observe(const std::vector<Judged>&) override {}
};

class ConfidenceThreshold final : public Controller {
 public:
  explicit ConfidenceThreshold(double threshold) : threshold_(threshold) {}
  bool stop(double confidence) override { return confidence < threshold_; }
  void observe(const std::vector<Judged>&) override {}

 private:
  double threshold_;
};

// Beta(prior + accepted, prior + rejected); only what was observed fades, the prior stays.
struct Posterior {
  double prior_accepted, prior_rejected;
  double accepted = 0.0, rejected = 0.0;

  double draw(NoiseStream& stream) const { return stream.beta(prior_accepted + accepted, prior_rejected + rejected); }
  void count(bool was_accepted) { (was_accepted ? accepted : rejected) += 1.0; }
  void forget(double discount) {
    accepted *= discount;
    rejected *= discount;
  }
};

class BetaThompson final : public Controller {
 public:
  BetaThompson(double discount, uint64_t seed) : discount_(discount), stream_(seed) {}

  bool stop(double) override {
    const double drawn = stream_.uniform();
    return drawn >= posterior_.draw(stream_);
  }

  void observe(const std::vector<Judged>& verdict) override {
    posterior_.forget(discount_);
    for (const Judged& judged : verdict) posterior_.count(judged.accepted);
  }

 private:
  double discount_;
  NoiseStream stream_;
  Posterior posterior_{1.0, 1.0};
};

class CalibratedThompson final : public Controller {
 public:
  CalibratedThompson(int bins, double weight, double discount, uint64_t seed) : discount_(discount), stream_(seed) {
    for (int bin = 0; bin < bins; ++bin) {
      const double centre = (bin + 0.5) / bins;
      posteriors_.push_back({weight * centre, weight * (1.0 - centre)});
    }
  }

  bool stop(double confidence) override {
    const double drawn = stream_.uniform();
    return drawn >= bin(confidence).draw(stream_);
  }

  void observe(const std::vector<Judged>& verdict) override {
    for (Posterior& posterior : posteriors_) posterior.forget(discount_);
    for (const Judged& judged : verdict) bin(judged.confidence).count(judged.accepted);
  }

 private:
  Posterior& bin(double confidence) {
    const int count = int(posteriors_.size());
    return posteriors_[std::min(int(confidence * count), count - 1)];
  }

  double discount_;
  NoiseStream stream_;
  std::vector<Posterior> posteriors_;
};

}  // namespace

std::unique_ptr<Controller> Controller::make(const StopRule& rule, uint64_t seed) {
  switch (rule.kind) {
    case StopRule::Kind::kConfidence: return std::make_unique<ConfidenceThreshold>(rule.threshold);
    case StopRule::Kind::kBeta: return std::make_unique<BetaThompson>(rule.discount, seed);
    case StopRule::Kind::kCalibrated:
      return std::make_unique<CalibratedThompson>(rule.bins, rule.weight, rule.discount, seed);
    case StopRule::Kind::kFixed: break;
  }
  return std::make_unique<FixedLength>();
}

}  // namespace ppsd
